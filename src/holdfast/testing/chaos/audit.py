"""What must be true of a run's folder whenever no driver runs, and of a run that has come to its end."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path

from holdfast import train
from holdfast.errors import StorageError
from holdfast.journal import facts as f
from holdfast.journal.fold import read_facts
from holdfast.journal.open import read_records
from holdfast.observe.history import fold_history
from holdfast.storage.manifest import read_manifest, verify
from holdfast.storage.store import open_store
from holdfast.testing.chaos import training


class BrokenPromise(AssertionError):
    """Something that Holdfast promises is not so."""


def check(true: bool, broken: str) -> None:
    if not true:
        raise BrokenPromise(broken)


class Auditor:
    """Follows one run over the deaths of its drivers."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._seen: list[bytes] = []

    def look(self) -> list[f.RunFact]:
        """Between two drivers: the journal has only grown, and every commit that it names is there and sound."""
        records = list(read_records(open_store(str(self._run)))) if self._run.exists() else []
        check(records[: len(self._seen)] == self._seen, "the journal has lost or changed what it held before")
        self._seen = records
        facts = list(read_facts(records))
        self._check_commits(facts)
        return facts

    def finish(self, undisturbed: train.Result) -> list[f.RunFact]:
        """At the end of a run: it has come to what the undisturbed one came to, and its books are in order."""
        facts = self.look()
        result = train.Result.from_path(self._run)
        check(result.error is None, f"the run has failed: {result.error}")
        assert result.checkpoint is not None
        assert undisturbed.checkpoint is not None
        check(
            training.load(result.checkpoint) == training.load(undisturbed.checkpoint)
            and result.return_value == undisturbed.return_value,
            "the weights are not those of the undisturbed run",
        )
        check(result.metrics_rows() == undisturbed.metrics_rows(), "the rows are not those of the undisturbed run")
        self._check_attempts(facts)
        kept = {Path(kept.path).name for kept, _ in result.best_checkpoints}
        check(len(kept) == training.KEEP, f"{len(kept)} checkpoints are kept, not {training.KEEP}")
        found = {path.name for path in self._run.glob("checkpoint_*")}
        check(found == kept, f"the folder holds {sorted(found)}, the journal {sorted(kept)}")
        return facts

    def _check_commits(self, facts: Iterable[f.RunFact]) -> None:
        sound: dict[int, str] = {}
        last = -1
        for fact in facts:
            if isinstance(fact, f.CheckpointCommitted):
                check(fact.index > last, f"checkpoint {fact.index} came after {last}")
                last = fact.index
                sound[fact.index] = fact.directory
            elif isinstance(fact, f.CheckpointDamaged):
                raise BrokenPromise(f"checkpoint {fact.index} was found damaged: {fact.reason}")
            elif isinstance(fact, f.CheckpointsRetired):
                check(max(sound) not in fact.indices, "the newest checkpoint was retired")
                sound = {index: directory for index, directory in sound.items() if index not in fact.indices}
            elif isinstance(fact, f.AttemptStarted):
                newest = max(sound, default=None)
                check(fact.resume == newest, f"attempt {fact.attempt} began from {fact.resume}, not from {newest}")
        store = open_store(str(self._run))
        for directory in sound.values():
            manifest = read_manifest(store, directory)
            if manifest is None:
                raise BrokenPromise(f"{directory} was committed and is gone")
            try:
                verify(store, directory, manifest)
            except StorageError as error:
                raise BrokenPromise(f"{directory} was committed and is not sound: {error}") from error

    def _check_attempts(self, facts: list[f.RunFact]) -> None:
        started = [fact.attempt for fact in facts if isinstance(fact, f.AttemptStarted)]
        ended = [fact for fact in facts if isinstance(fact, f.AttemptEnded)]
        check(started == list(range(1, len(started) + 1)), f"attempts were numbered {started}")
        check([fact.attempt for fact in ended] == started, "an attempt did not end, or ended twice")
        charged: dict[str, int] = {}
        for fact in facts:
            if isinstance(fact, f.RunOpened) and fact.fresh_budget:
                charged = {}
            elif isinstance(fact, f.AttemptEnded) and fact.charge:
                check(fact.outcome == "failed", f"attempt {fact.attempt} was charged and is {fact.outcome}")
                charged[fact.charge] = charged.get(fact.charge, 0) + 1
        told = fold_history(facts).charged
        check(told == charged, f"the budgets say {told}, the attempts {charged}")


def recoveries(facts: Iterable[f.RunFact], deaths: Iterable[float]) -> list[float]:
    """Seconds from each of these moments to the next one at which every rank was running."""
    running = sorted(fact.at for fact in facts if isinstance(fact, f.AttemptRunning))
    found = []
    for death in deaths:
        after = next((at for at in running if at > death), None)
        if after is not None:
            found.append(after - death)
    return found


def median_ms(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1000:.0f} ms" if seconds else "none"
