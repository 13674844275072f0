"""Chaos on real processes: a run whose workers, agents, janitors and drivers are killed and stopped at random, whose
uploads fail and whose disk is full for a while, and which must come to the same end as an undisturbed one.

``python -m holdfast.testing.chaos --minutes 10``. ``training`` is what is run, ``storm`` does the harm, ``audit`` looks
at what is left, ``rounds`` brings the three together.
"""
