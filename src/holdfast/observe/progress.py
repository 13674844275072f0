"""The line at the bottom of a terminal that says how a run gets on, and updates in place.

A fact costs a few assignments here; a thread of its own draws the line, at most five times a second, so that drawing
does not hold up the run. Whatever else is printed appears above the line. One run of a process has it at a time. It
must never fail a run. What draws is loaded when there is a terminal to draw on.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, TextIO

from holdfast.journal import facts as f
from holdfast.observe.history import History
from holdfast.observe.tables import ATTEMPTS, attempt_rows, draw_table, is_terminal
from holdfast.observe.wording import brief, reports
from holdfast.wire.metrics import decode_metrics

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

PER_SECOND = 5
WINDOW_S = 5.0
"""Over how long the rate of reports is taken."""


class Progress:
    """An observer of one run's facts, between ``start`` and ``stop``."""

    def __init__(self, history: History) -> None:
        self._began = time.monotonic()
        self._attempt = 0
        self._state = "opening"
        self._made = 0
        self._total = 0
        self._rows: f.RowsReported | None = None
        newest = history.newest
        self._newest = newest.directory if newest else ""
        self._samples: deque[tuple[float, int]] = deque()
        self._live: Live | None = None

    def start(self, stream: TextIO) -> None:
        """Show the line, where a person looks and no other run has it."""
        global _shown
        with _lock:
            if _shown is not None or not is_terminal(stream):
                return
            _shown = self
        from rich.console import Console
        from rich.live import Live

        with contextlib.suppress(OSError, ValueError):
            self._live = Live(
                console=Console(file=stream),
                get_renderable=self._line,
                refresh_per_second=PER_SECOND,
                transient=True,
                redirect_stderr=is_terminal(sys.stderr),
            )
            self._live.start()
            self._live.console.show_cursor(True)  # a driver that is killed must not leave the terminal without one

    def stop(self) -> None:
        """Take the line away."""
        global _shown
        with _lock:
            if _shown is not self:
                return
            _shown = None
        live, self._live = self._live, None
        if live is None:
            return
        thread = next((thread for thread in threading.enumerate() if getattr(thread, "live", None) is live), None)
        with contextlib.suppress(OSError, ValueError):
            live.stop()
        if thread is not None:
            thread.join()

    def observe(self, change: object) -> None:
        """Take in a fact."""
        if isinstance(change, f.RowsReported):
            if change.rank == 0:
                self._rows = change
                self._made = change.first + change.count - 1
                self._total += change.count
        elif isinstance(change, f.CheckpointCommitted):
            self._newest = change.directory
        elif isinstance(change, f.AttemptStarted):
            self._attempt, self._state, self._made = change.attempt, "starting", 0
        elif isinstance(change, f.AttemptRunning):
            self._state = "running"
        elif isinstance(change, f.AttemptEnded):
            self._state = change.outcome.replace("_", " ")

    def print(self, text: str) -> bool:
        """Print above the line; whether there is one."""
        live = self._live
        if live is None:
            return False
        from rich.text import Text

        live.console.print(Text(text.removesuffix("\n")), soft_wrap=True, highlight=False)
        return True

    def _line(self) -> Text:
        """Drawn in the thread that refreshes."""
        from rich.text import Text

        elapsed = int(time.monotonic() - self._began)
        clock = f"{elapsed // 3600}:{elapsed // 60 % 60:02}:{elapsed % 60:02}"
        parts = [f"attempt {self._attempt} {self._state}" if self._attempt else self._state, clock, reports(self._made)]
        rate = self._rate()
        if rate is not None:
            parts.append(f"{rate:.3g}/s")
        rows = self._rows
        if rows is not None:
            parts.append(brief(decode_metrics(rows.rows)[-1], 4))
        if self._newest:
            parts.append(self._newest)
        return Text(" · ".join(parts), style="cyan", no_wrap=True, overflow="ellipsis")

    def _rate(self) -> float | None:
        """Reports of rank 0 per second, lately."""
        now, total = time.monotonic(), self._total
        self._samples.append((now, total))
        while now - self._samples[0][0] > WINDOW_S:
            self._samples.popleft()
        then, before = self._samples[0]
        return (total - before) / (now - then) if total and now - then >= 1 / PER_SECOND else None


_shown: Progress | None = None
_lock = threading.Lock()


def print_above(text: str) -> bool:
    """Print where a progress line is shown; False where none is, and then nothing is printed."""
    shown = _shown
    return shown is not None and shown.print(text)


def print_attempts(history: History, until: float, stream: TextIO) -> None:
    """The attempts of a run that had several, where a person looks."""
    if len(history.attempts) > 1 and is_terminal(stream):
        draw_table(ATTEMPTS, attempt_rows(history, until), stream)
