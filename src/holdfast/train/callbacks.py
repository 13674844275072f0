"""What a user's own code in the driver is called with while a run goes on. ``train/audience.py`` does the calling."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.train.checkpoint import Checkpoint
    from holdfast.train.config import RunConfig, ScalingConfig


@dataclasses.dataclass(frozen=True)
class TrainRunContext:
    """The run that a callback hears of. ``run_config`` has the run's name, also where that was generated."""

    run_config: RunConfig
    scaling_config: ScalingConfig


class UserCallback:
    """Hears what happens to a run. Override what you need, and pass an object to ``RunConfig(callbacks=[…])``.

    The calls are made in the driver's process, one after the other, from a thread of their own: they hold up neither
    the workers nor each other's run, and ``fit`` returns when the last one has. A callback that raises is reported once
    and called again the next time; it does not end the run. One that stays 10,000 reports behind misses some, and the
    console says so.
    """

    def after_report(
        self, run_context: TrainRunContext, metrics: list[dict[str, Any]], checkpoint: Checkpoint | None
    ) -> None:
        """Every rank has made the same call of ``report``; ``metrics`` has one dict for each rank.

        ``checkpoint`` is what the ranks committed with this call, if they did.
        """

    def after_exception(self, run_context: TrainRunContext, worker_exceptions: dict[int, BaseException]) -> None:
        """An attempt has failed; ``worker_exceptions`` has the error of each rank that failed, the first one first."""
