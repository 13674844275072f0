"""Holdfast: training jobs that survive the death of anything.

``holdfast.train`` has the names of a training script. ``init`` and ``shutdown`` shape and end the processes that
runs share; neither has to be called.
"""

from __future__ import annotations

__version__ = "0.1.0"

__all__ = ["__version__", "init", "shutdown"]


def init(*, nodes: int | None = None, cpus_per_node: float | None = None, gpus_per_node: float = 0) -> None:
    """Give this machine the shape of several nodes, before the first ``fit``: each with its own agent and folder.

    Without it there is one node, and a group larger than the machine shares its cores.
    """
    from holdfast.engine import driver

    driver.init(nodes=nodes, cpus_per_node=cpus_per_node, gpus_per_node=gpus_per_node)


def shutdown() -> None:
    """End what this process runs, and the agents that its runs have left warm. A ``fit`` in another thread raises, and
    its run can be resumed. Called by itself when the process ends.
    """
    import sys

    driver = sys.modules.get("holdfast.engine.driver")
    if driver is not None:
        driver.shutdown()
