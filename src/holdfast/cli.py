"""The ``holdfast`` command: look at runs from another process, and ask a run to stop.

It reads journals, manifests and logs, and writes nothing but requests. It must never take a run. Exit codes: 0 done, 1
not found, refused or failed, 2 bad input.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Any, NoReturn

import msgspec
from cyclopts import App, Parameter
from cyclopts.exceptions import CycloptsError

from holdfast import __version__
from holdfast.errors import ConfigurationError, HoldfastError
from holdfast.journal.epochs import holder_of
from holdfast.journal.requests import Request, ask_to_stop
from holdfast.observe import listing, logs, tables
from holdfast.observe.goodput import goodput
from holdfast.observe.history import Commit
from holdfast.observe.wording import account, age, brief, size
from holdfast.storage.store import Store, open_store
from holdfast.train.config import DEFAULT_STORAGE
from holdfast.wire.metrics import decode_metrics

LOOK_S = 1.0
"""How often a command that follows a run looks whether its driver still lives."""

Where = Annotated[str, Parameter(help="The run's folder or URI: storage_path/name.")]
AsJson = Annotated[bool, Parameter(name="--json", negative=(), help="One JSON document on stdout.")]
Wait = Annotated[
    bool,
    Parameter(negative=(), help="Watch the lease of drivers on other machines, to tell whether they live."),
]

app = App(
    name="holdfast",
    help="Look at training runs, follow their logs, and stop them.",
    version=__version__,
    result_action="return_value",
)


class Refused(Exception):
    """What was asked cannot be done; the message says why and what to do."""


@app.command
def ls(path: str = DEFAULT_STORAGE, /, *, wait: Wait = False, json: AsJson = False) -> int:
    """List the runs below a storage path.

    Parameters
    ----------
    path
        A storage_path that holds runs, or one run.
    """
    found = listing.runs_below(_existing(path), wait=wait)
    if json:
        _print_json([listing.summary(seen) for seen in found])
    elif not found:
        _complain(f"no runs below {path}")
    else:
        header = ("name", "status", "attempts", "failures", "checkpoint", "metrics", "age")
        tables.print_table(header, [_summary_row(seen) for seen in found])
    return 0


@app.command
def show(
    path: Where,
    /,
    *,
    traceback: Annotated[bool, Parameter(negative=(), help="With the traceback of each root cause.")] = False,
    wait: Wait = False,
    json: AsJson = False,
) -> int:
    """Show one run: its attempts and what each cost, its failures, its checkpoints, where its time went."""
    seen = listing.look(_run(path), wait=wait)
    if json:
        _print_json(listing.description(seen, tracebacks=traceback))
    elif not seen.trouble:
        _print_run(seen, tracebacks=traceback)
    if seen.trouble:
        raise Refused(seen.trouble)
    return 0


@app.command(name="logs")
def logs_(
    path: Where,
    /,
    *,
    rank: Annotated[str, Parameter(help="A rank, or all.")] = "0",
    attempt: Annotated[int | None, Parameter(help="An attempt's number; the newest if not given.")] = None,
    follow: Annotated[
        bool, Parameter(name=("--follow", "-f"), negative=(), help="Go on, across new attempts, until the run ends.")
    ] = False,
    lines: Annotated[int | None, Parameter(name=("--lines", "-n"), help="Only the last lines of each log.")] = None,
    json: AsJson = False,
) -> int:
    """Print what the workers of a run have printed."""
    chosen = _rank(rank)
    if lines is not None and lines < 0:
        raise ConfigurationError(f"-n {lines}: give a number of lines, 0 or more")
    store = _run(path)
    if follow:
        return _follow(store, chosen, attempt, lines, json=json)
    number = _logged_attempt(store, chosen, attempt)
    found = logs.read_logs(store, number, chosen, lines)
    if json:
        _print_json([line._asdict() for line in found])
        return 0
    for line in found:
        _print_line(line, prefixed=chosen is None)
    return 0


@app.command
def stop(
    path: Where,
    /,
    *,
    wait: Annotated[bool, Parameter(negative=(), help="Return when the run has stopped.")] = False,
    json: AsJson = False,
) -> int:
    """Ask the live driver of a run to stop cleanly. Its script resumes it."""
    store = _run(path)
    seen = listing.look(store)
    if seen.status == listing.UNKNOWN:
        _complain(f"{_who(seen)} is on another machine; watching its lease")
        seen = listing.look(store, wait=True)
    if seen.status != listing.RUNNING or seen.holder is None:
        raise Refused(f"run {seen.name!r} has no live driver, so there is nothing to stop: {_standing(seen)}")
    first = ask_to_stop(store, seen.epoch, Request(at=time.time(), host=socket.gethostname(), pid=os.getpid()))
    if not json:
        asked = "asked" if first else "was asked before, and has not answered yet"
        print(f"{asked} {_who(seen)} to stop run {seen.name!r}" if first else f"{_who(seen)} {asked}", flush=True)
    if wait:
        while listing.is_driven(store, seen.epoch, seen.holder, wait=True):
            time.sleep(logs.LOOK_S)
        seen = listing.look(store)
    if json:
        _print_json(listing.summary(seen) | {"asked_before": not first})
    elif wait:
        print(f"run {seen.name!r}: {_standing(seen)}")
    return int(wait and seen.status not in ("STOPPED", "FINISHED"))


def _existing(path: str) -> Store:
    """The store at ``path``, which must be there."""
    store = open_store(path)
    inside = store.local_path("epochs")
    if inside is not None and not inside.parent.is_dir():
        raise Refused(f"{path} does not exist")
    return store


def _run(path: str) -> Store:
    store = _existing(path)
    if listing.is_run(store):
        return store
    below = [name for name in store.folders("") if listing.is_run(store.child(name))]
    hint = f"; below it lie: {', '.join(below[:5])}{', …' if len(below) > 5 else ''}" if below else ""
    raise Refused(f"{path} holds no run{hint}. `holdfast ls PATH` lists the runs below a storage path")


def _rank(text: str) -> int | None:
    if text == "all":
        return None
    if not text.isdecimal():
        raise ConfigurationError(f"--rank {text}: give a rank's number, or all")
    return int(text)


def _logged_attempt(store: Store, rank: int | None, attempt: int | None) -> int:
    """The attempt to read; Refused when it, or the rank, has left no log."""
    found = logs.attempts_logged(store)
    if not found:
        raise Refused(f"the run in {store.uri} has no logs yet")
    if attempt is not None and attempt not in found:
        raise Refused(f"attempt {attempt} has no logs; there are: {', '.join(map(str, found))}")
    number = found[-1] if attempt is None else attempt
    ranks = logs.ranks_logged(store, number)
    if rank is not None and rank not in ranks:
        raise Refused(f"rank {rank} of attempt {number} has no log; there are: {', '.join(map(str, ranks)) or 'none'}")
    return number


def _follow(store: Store, rank: int | None, attempt: int | None, last_lines: int | None, *, json: bool) -> int:
    known = 0
    over = _over(store)
    for line in logs.follow_logs(store, rank, attempt=attempt, last_lines=last_lines, over=over):
        if json:
            print(msgspec.json.encode(line._asdict()).decode(), flush=True)
            continue
        if known and line.attempt != known:
            _complain(f"attempt {line.attempt}")
        known = line.attempt
        _print_line(line, prefixed=rank is None)
    seen = listing.look(store)
    if seen.status != listing.RUNNING:
        _complain(f"run {seen.name!r}: {_standing(seen)}")
    return 0


def _over(store: Store) -> Callable[[], bool]:
    """Tells, looking now and then, whether nobody drives the run any more."""
    looked, answer = 0.0, False

    def over() -> bool:
        nonlocal looked, answer
        if time.monotonic() - looked >= LOOK_S:
            looked = time.monotonic()
            held = holder_of(store)
            answer = held is None or listing.is_driven(store, *held, wait=False) is False
        return answer

    return over


def _print_line(line: logs.Line, *, prefixed: bool) -> None:
    print(f"(rank {line.rank}) {line.text}" if prefixed else line.text, flush=True)


def _summary_row(seen: listing.Seen) -> tuple[str, ...]:
    history, newest, metrics = seen.history, seen.history.newest, seen.history.last_metrics()
    opened = history.opened[0].at if history.opened else seen.now
    return (
        seen.name,
        f"{seen.status} ({_who(seen)})" if seen.status in (listing.RUNNING, listing.UNKNOWN) else seen.status,
        str(len(history.attempts)),
        str(seen.failures),
        newest.directory if newest else "-",
        brief(metrics, 3) if metrics else "-",
        age(seen.now - opened),
    )


def _print_run(seen: listing.Seen, *, tracebacks: bool) -> None:
    history = seen.history
    print(f"run {seen.name!r}: {_standing(seen)}")
    print(f"storage {seen.path}")
    if history.opened:
        print(f"function {history.opened[-1].function}, opened {_moment(history.opened[0].at)}")
        print(account(goodput(history, seen.until)))
    metrics = history.last_metrics()
    if metrics:
        print(f"last metrics {brief(metrics, 20)}")
    if history.attempts:
        unfinished = listing.outcome_of(seen, history.attempts[max(history.attempts)]).replace("_", " ")
        rows = tables.attempt_rows(history, seen.until, unfinished)
        starts = [_moment(attempt.started_at) for attempt in history.attempts.values()]
        print()
        tables.print_table(
            (tables.ATTEMPTS[0], "started", *tables.ATTEMPTS[1:]),
            [(row[0], start, *row[1:]) for row, start in zip(rows, starts, strict=True)],
        )
    if history.commits:
        print()
        header = ("checkpoint", "committed", "attempt", "size", "state", "metrics")
        tables.print_table(header, [_checkpoint_row(commit) for _, commit in sorted(history.commits.items())])
    if tracebacks:
        for attempt in history.attempts.values():
            if attempt.failures and attempt.failures[0].traceback:
                root = attempt.failures[0]
                print(f"\nattempt {attempt.number}, rank {root.rank}:\n{root.traceback.rstrip()}")


def _checkpoint_row(commit: Commit) -> tuple[str, ...]:
    metrics = decode_metrics(commit.metrics)
    return (
        commit.directory,
        _moment(commit.at),
        str(commit.attempt),
        size(commit.size),
        listing.state_of(commit),
        brief(metrics, 3) if metrics else "-",
    )


def _standing(seen: listing.Seen) -> str:
    """How a run stands, and what to do about it."""
    if seen.status == listing.RUNNING:
        return f"RUNNING, driven by {_who(seen)}"
    if seen.status == listing.UNKNOWN:
        return f"UNKNOWN: {_who(seen)} is on another machine; --wait watches its lease"
    if seen.status == listing.INTERRUPTED:
        return f"INTERRUPTED: its driver, {_who(seen)}, is gone; run its script again to resume it"
    return f"{seen.status}: {seen.trouble or seen.history.reason}".removesuffix(": ")


def _who(seen: listing.Seen) -> str:
    return f"pid {seen.holder.pid} on {seen.holder.host}" if seen.holder else "nobody"


def _moment(at: float) -> str:
    return datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _print_json(document: Any) -> None:
    print(msgspec.json.format(msgspec.json.encode(document)).decode(), flush=True)


def _complain(text: str) -> None:
    print(f"holdfast: {text}", file=sys.stderr, flush=True)


def run(arguments: list[str] | None = None) -> int:
    """The command with these arguments; its exit code."""
    try:
        code = app(arguments, exit_on_error=False)
        return code if isinstance(code, int) else 0
    except CycloptsError:  # it has been printed
        return 2
    except ConfigurationError as error:
        _complain(str(error))
        return 2
    except (Refused, HoldfastError) as error:
        _complain(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read has gone, and Python must not say so when it flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def main() -> NoReturn:
    sys.exit(run())
