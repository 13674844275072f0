"""Holdfast and Ray Train side by side: the same training functions, alternating, each in a fresh process.

`make bench` sets up both environments and runs `python -m bench`. Nothing here is part of the installed package.
"""
