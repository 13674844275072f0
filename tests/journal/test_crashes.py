"""Real drivers, killed at random moments, and a disk that fills up."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from holdfast.errors import JournalError
from holdfast.journal.epochs import this_process
from holdfast.journal.open import open_log, read_records
from holdfast.storage.files import FileStore
from tests.journal.driver import record
from tests.journal.processes import driving
from tests.journal.stores import make_store


def test_a_killed_driver_loses_nothing_that_it_was_told_is_safe(kind: str, tmp_path: Path) -> None:
    store = make_store(kind, tmp_path / "run")
    chance = random.Random(11)
    safe = 0
    for life in range(1, 6):
        with driving(kind, tmp_path / "run") as driver:
            opened = driver.ask("open").split()
            assert opened[:2] == ["ok", str(life)]
            assert int(opened[2]) >= safe
            driver.send("run")
            told = [driver.answer()]
            time.sleep(chance.uniform(0.0, 0.06))
            told += [line for line in driver.kill() if line]
            safe = int(told[-1] if told[-1].isdigit() else told[-2])
        seen = list(read_records(store))
        assert len(seen) >= safe
        assert seen == [record(number) for number in range(1, len(seen) + 1)]
    assert safe > 5


def test_a_reader_beside_a_driver_sees_a_growing_prefix(kind: str, quick: Path) -> None:
    store = make_store(kind, quick / "run")
    with driving(kind, quick / "run") as driver:
        driver.ask("open")
        driver.send("run")
        lengths = []
        while not lengths or lengths[-1] < 200:
            seen = list(read_records(store))
            assert seen == [record(number) for number in range(1, len(seen) + 1)]
            lengths.append(len(seen))
            driver.answer()
        assert lengths == sorted(lengths)
        driver.kill()


def test_a_full_disk_is_named_and_what_was_safe_stays(small_disk: Path) -> None:
    store = FileStore(small_disk / "run")
    ballast = small_disk / "ballast"
    log, _ = open_log(store, this_process())
    log.append(record(1))
    log.sync()
    ballast.write_bytes(b"x" * (1 << 20))
    for number in range(2, 40_000):
        log.append(record(number))
    for _ in range(2):
        with pytest.raises(JournalError, match=r"cannot keep the journal: .* the disk that holds .*/run is full"):
            log.sync()
    assert list(read_records(store)) == [record(1)]
    ballast.unlink()
    with pytest.raises(JournalError, match="is full"):
        log.sync()
    log.close()
    again, replay = open_log(store, this_process())
    assert list(replay.records) == [record(1)]
    again.append(record(2))
    again.sync()
    again.close()


def test_a_disk_that_is_full_from_the_start_says_so_and_holds_nothing(small_disk: Path) -> None:
    store = FileStore(small_disk / "run")
    ballast = small_disk / "ballast"
    with open(ballast, "wb", buffering=0) as file:
        while os.statvfs(small_disk).f_bavail:
            file.write(b"x" * 4096)
    with pytest.raises(JournalError, match="is full"):
        open_log(store, this_process())
    ballast.unlink()
    log, _ = open_log(store, this_process())
    log.close()
