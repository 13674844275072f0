"""A driver that was displaced while it slept does nothing that counts when it wakes up."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import FencedError, StorageError
from holdfast.journal.epochs import this_process
from holdfast.journal.log import Snapshot
from holdfast.journal.object_log import segment_key
from holdfast.journal.open import open_log, read_records
from holdfast.storage.store import Store
from tests.journal.driver import record
from tests.journal.processes import driving
from tests.journal.stores import CarelessStore, SegmentStore, make_store


def test_a_stopped_driver_that_goes_on_is_fenced_and_never_folded(kind: str, quick: Path) -> None:
    store = make_store(kind, quick / "run")
    with driving(kind, quick / "run") as driver:
        assert driver.ask("open") == "ok 1 0 0"
        assert driver.ask("append 3") == "ok 3"
        assert driver.ask("sync") == "ok 3"
        assert driver.ask("append 2") == "ok 5"
        driver.stop()
        log, replay = open_log(store, this_process(), take_over=True)
        assert list(replay.records) == [record(1), record(2), record(3)]
        log.append(b'{"by":"the newcomer"}')
        log.sync()
        driver.go_on()
        for order in ("sync", "sync", "confirm", "renew"):
            assert driver.ask(order).startswith("FencedError another driver has taken over")
        log.append(b'{"by":"the newcomer still"}')
        log.sync()
        log.close()
    expected = [record(1), record(2), record(3), b'{"by":"the newcomer"}', b'{"by":"the newcomer still"}']
    assert list(read_records(store)) == expected
    again, replay = open_log(store, this_process())
    assert list(replay.records) == expected
    again.close()


@pytest.mark.parametrize("place", ["journal.write", "journal.written"])
def test_a_driver_stopped_within_sync_is_fenced(kind: str, quick: Path, place: str) -> None:
    store = make_store(kind, quick / "run")
    with driving(kind, quick / "run") as driver:
        driver.ask("open")
        driver.ask("append 2")
        assert driver.ask("sync") == "ok 2"
        driver.ask("append 1")
        driver.ask(f"arm {place} stop")
        driver.send("sync")
        driver.until_stopped()
        log, replay = open_log(store, this_process(), take_over=True)
        folded = list(replay.records)
        # What was on the disk in time is folded, though nobody was told that it was safe.
        assert folded == [record(number + 1) for number in range(2 if place == "journal.write" else 3)]
        driver.go_on()
        answer = driver.answer()
        if kind == "segments" and place == "journal.written":
            # The segment came before the newcomer's: it counts, and the next one finds its number taken.
            assert answer == "ok 3"
            driver.ask("append 1")
            answer = driver.ask("sync")
        assert answer.startswith("FencedError")
        log.append(b'{"by":"the newcomer"}')
        log.sync()
        log.close()
    assert list(read_records(store)) == [*folded, b'{"by":"the newcomer"}']


@pytest.mark.parametrize("place", ["journal.claimed", "journal.seal"])
def test_a_newcomer_stopped_before_it_sealed_cannot_rewrite_history(kind: str, quick: Path, place: str) -> None:
    """Epoch 2 sleeps before it seals, epoch 3 goes on from epoch 1, epoch 2 wakes up with an older view."""
    store = make_store(kind, quick / "run")
    first, _ = open_log(store, this_process())
    first.append(record(1))
    first.sync()
    with driving(kind, quick / "run") as driver:
        driver.ask(f"arm {place} stop")
        driver.send("open take_over")
        driver.until_stopped()
        third, replay = open_log(store, this_process(), take_over=True)
        assert third.epoch == 3
        assert list(replay.records) == [record(1)]
        third.append(b'{"by":3}')
        third.sync()
        driver.go_on()
        assert driver.answer().startswith("FencedError")
        third.append(b'{"by":"3 still"}')
        third.sync()
        third.close()
    expected = [record(1), b'{"by":3}', b'{"by":"3 still"}']
    assert list(read_records(store)) == expected
    fourth, replay = open_log(store, this_process())
    assert list(replay.records) == expected
    fourth.close()
    with pytest.raises(FencedError):
        first.sync()
    first.close()


@pytest.mark.parametrize("place", ["journal.claimed", "journal.seal"])
def test_a_newcomer_killed_before_it_sealed_is_passed_over(kind: str, quick: Path, place: str) -> None:
    store = make_store(kind, quick / "run")
    first, _ = open_log(store, this_process())
    first.append(record(1))
    first.sync()
    first.close()
    for _ in range(2):
        with driving(kind, quick / "run") as driver:
            driver.ask(f"arm {place} kill")
            driver.send("open")
            driver.process.wait()
    log, replay = open_log(store, this_process())
    assert log.epoch == 4
    assert list(replay.records) == [record(1)]
    log.append(record(2))
    log.sync()
    log.close()
    assert list(read_records(store)) == [record(1), record(2)]


def test_a_late_snapshot_of_a_fenced_driver_changes_nothing(store: Store) -> None:
    old, _ = open_log(store, this_process())
    old.append(record(1))
    old.sync()
    new, _ = open_log(store, this_process(), take_over=True)
    new.append(record(2))
    new.sync()
    new.snapshot(Snapshot(2, b"2"))
    with pytest.raises(FencedError):
        old.snapshot(Snapshot(1, b"1"))
    new.close()
    old.close()
    again, replay = open_log(store, this_process())
    assert replay.snapshot == Snapshot(2, b"2")
    again.close()


class ForgetfulStore(SegmentStore):
    """Creates, and says that something was there already: a second try after a lost answer."""

    forget = False

    def create(self, key: str, data: bytes) -> bool:
        made = super().create(key, data)
        if self.forget and key.endswith((".seg", ".json")):
            return False
        return made


def test_a_segment_whose_answer_was_lost_is_known_as_ours(quick: Path) -> None:
    store = ForgetfulStore(quick / "run")
    store.forget = True
    log, _ = open_log(store, this_process())
    assert log.epoch == 1
    log.append(record(1))
    assert log.sync() == 1
    log.close()
    assert list(read_records(store)) == [record(1)]


def test_a_predecessor_that_gets_in_first_is_folded(quick: Path) -> None:
    store = SegmentStore(quick / "run")
    old, _ = open_log(store, this_process())
    old.append(record(1))

    class Overtaken(SegmentStore):
        """The old driver's segment comes just before the newcomer's."""

        def create(self, key: str, data: bytes) -> bool:
            if key == segment_key(2):
                old.sync()
            return super().create(key, data)

    new, replay = open_log(Overtaken(quick / "run"), this_process(), take_over=True)
    assert list(replay.records) == [record(1)]
    assert new.position == 1
    old.append(record(2))
    with pytest.raises(FencedError):
        old.sync()
    new.append(b'{"by":"new"}')
    new.sync()
    new.close()
    assert list(read_records(store)) == [record(1), b'{"by":"new"}']


def test_a_store_that_ignores_the_condition_is_found_and_the_lease_protects(quick: Path) -> None:
    store = CarelessStore(quick / "run")
    old, _ = open_log(store, this_process())
    assert old.protection == "lease"
    old.append(record(1))
    old.sync()
    old.append(record(2))
    new, replay = open_log(store, this_process(), take_over=True)
    assert list(replay.records) == [record(1)]
    with pytest.raises(FencedError):
        old.sync()
    new.append(b'{"by":"new"}')
    new.sync()
    new.close()
    old.close()
    assert list(read_records(store)) == [record(1), b'{"by":"new"}']
    sound, _ = open_log(SegmentStore(quick / "sound"), this_process())
    assert sound.protection == "fence"
    sound.close()


class BrokenStore(SegmentStore):
    broken = False

    def create(self, key: str, data: bytes) -> bool:
        if self.broken:
            raise StorageError(f"cannot write {key!r}: the network is down")
        return super().create(key, data)


def test_after_a_failed_sync_every_further_one_fails_the_same_way(quick: Path) -> None:
    from holdfast.errors import JournalError

    store = BrokenStore(quick / "run")
    log, _ = open_log(store, this_process())
    log.append(record(1))
    store.broken = True
    for _ in range(2):
        with pytest.raises(JournalError, match="the network is down"):
            log.sync()
        store.broken = False
    log.close()
    assert list(read_records(store)) == []
