"""What was synced comes back, whatever was cut, changed or lost behind it; and nothing else ever does."""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.errors import JournalError
from holdfast.journal.epochs import this_process
from holdfast.journal.log import Log, Snapshot
from holdfast.journal.open import open_log, read_records
from holdfast.storage.files import FileAppender, FileStore
from holdfast.storage.store import Store, open_store
from tests.journal.driver import record
from tests.journal.stores import make_store


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def write(log: Log, batches: list[int]) -> None:
    for size in batches:
        for _ in range(size):
            log.append(record(log.position + 1))
        log.sync()


def records(count: int) -> list[bytes]:
    return [record(number) for number in range(1, count + 1)]


def recovered(store: Store) -> list[bytes]:
    """Every record, by the newest snapshot, whose state is the number of records in it, and those after it."""
    log, replay = open_log(store, this_process())
    before = int(replay.snapshot.state) if replay.snapshot else 0
    found = records(before) + list(replay.records)
    assert log.position == len(found)
    log.close()
    return found


def newest_file(root: Path) -> Path:
    return sorted((root / "journal").glob("0*"))[-1]


def test_what_was_synced_comes_back_across_drivers(store: Store) -> None:
    total = 0
    for epoch, batches in enumerate([[1], [3, 0, 2], [], [5]], 1):
        log, replay = open_log(store, this_process())
        assert log.epoch == epoch
        assert list(replay.records) == records(total)
        write(log, batches)
        total += sum(batches)
        assert log.durable == log.position == total
        log.append(b'{"lost":true}')
        log.close()
    assert recovered(store) == records(total)
    assert list(read_records(store)) == records(total)


def test_a_run_that_never_was_has_no_records(store: Store) -> None:
    assert list(read_records(store)) == []


def test_a_record_is_one_line(store: Store) -> None:
    log, _ = open_log(store, this_process())
    with pytest.raises(ValueError, match="one line"):
        log.append(b"{\n}")
    log.close()


def test_a_journal_cut_at_any_byte_gives_back_what_was_synced_before_the_cut(kind: str, quick: Path) -> None:
    root = quick / "run"
    store = make_store(kind, root)
    log, _ = open_log(store, this_process())
    write(log, [2, 1])
    log.close()
    log, _ = open_log(store, this_process())
    ends = [(0, log.durable)]
    for batch in [2, 1, 3]:
        write(log, [batch])
        ends.append((newest_file(root).stat().st_size, log.durable))
    log.close()
    if kind == "segments":
        ends = [(0, log.durable - 3), ends[-1]]
    whole = newest_file(root).read_bytes()
    name = newest_file(root).name
    for cut in range(len(whole) + 1):
        copy = quick / "copy"
        shutil.copytree(root, copy)
        (copy / "journal" / name).write_bytes(whole[:cut])
        safe = max(position for length, position in ends if length <= cut)
        seen = list(read_records(make_store(kind, copy)))
        assert seen == records(len(seen))
        assert len(seen) >= safe
        log, replay = open_log(make_store(kind, copy), this_process())
        assert list(replay.records) == seen
        write(log, [1])
        log.close()
        assert list(read_records(make_store(kind, copy))) == records(len(seen) + 1)
        shutil.rmtree(copy)


def test_a_cut_before_a_seal_is_damage_and_said(kind: str, quick: Path) -> None:
    root = quick / "run"
    store = make_store(kind, root)
    log, _ = open_log(store, this_process())
    write(log, [2, 1])
    sealed = newest_file(root)
    log.close()
    log, _ = open_log(store, this_process())
    write(log, [1])
    log.close()
    whole = sealed.read_bytes()
    for cut in range(len(whole)):
        sealed.write_bytes(whole[:cut])
        with pytest.raises(JournalError, match=r"damaged|missing"):
            list(read_records(store))
    sealed.write_bytes(whole + b"what a fenced driver wrote")
    assert list(read_records(store)) == records(4)
    sealed.unlink()
    with pytest.raises(JournalError, match="missing"):
        list(read_records(store))


def test_a_changed_byte_is_never_believed(kind: str, quick: Path) -> None:
    root = quick / "run"
    store = make_store(kind, root)
    log, _ = open_log(store, this_process())
    lengths = []
    for batch in [1, 2, 1, 1]:
        write(log, [batch])
        lengths.append(newest_file(root).stat().st_size)
    log.close()
    assert list(read_records(store)) == records(5)
    damaged = sorted((root / "journal").glob("0*"))[0 if kind == "files" else 2]
    whole = damaged.read_bytes()
    # The last batch looks like an unfinished one, and so does the line whose end and proof it shares.
    last_batch = lengths[-2] - 1
    for at in range(len(whole)):
        for flip in (1, 0x80):
            damaged.write_bytes(whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :])
            if kind == "segments" or at < last_batch:
                with pytest.raises(JournalError, match=r"damaged|another version|missing"):
                    list(read_records(store))
            else:
                assert list(read_records(store)) == records(3 if at == last_batch else 4)


def test_a_hole_that_a_power_loss_tore_into_the_last_unsynced_batch_is_a_tail(quick: Path) -> None:
    store = FileStore(quick / "run")
    log, _ = open_log(store, this_process())
    write(log, [2, 3])
    log.close()
    path = newest_file(quick / "run")
    lines = path.read_bytes().splitlines(keepends=True)
    lines[3] = b"\0" * len(lines[3])
    path.write_bytes(b"".join(lines))
    assert recovered(store) == records(2)


@pytest.mark.parametrize("change", ["lost", "repeated"])
def test_a_line_that_is_lost_or_repeated_is_seen_by_its_number(quick: Path, change: str) -> None:
    store = FileStore(quick / "run")
    log, _ = open_log(store, this_process())
    write(log, [2, 3])
    log.close()
    path = newest_file(quick / "run")
    lines = path.read_bytes().splitlines(keepends=True)
    for number in range(1, 6):
        around = [] if change == "lost" else [lines[number], lines[number]]
        path.write_bytes(b"".join([*lines[:number], *around, *lines[number + 1 :]]))
        if number <= 2 and not (change == "repeated" and number == 2):
            with pytest.raises(JournalError, match=f"damaged at record {number if change == 'lost' else number + 1}"):
                list(read_records(store))
        else:
            assert list(read_records(store)) == records(number if change == "repeated" else number - 1)


def test_garbage_behind_the_last_record_is_ignored(quick: Path) -> None:
    store = FileStore(quick / "run")
    for garbage in (b"\0" * 5000, b"\n\n\n", b"0123456789abcdef\t9\t9\t{}\n", b"\xff\xfe", record(9) + b"\n"):
        log, _ = open_log(store, this_process())
        write(log, [1])
        log.close()
        with open(newest_file(quick / "run"), "ab") as file:
            file.write(garbage)
    assert recovered(store) == records(5)


def test_a_snapshot_cut_at_any_byte_falls_back(kind: str, quick: Path) -> None:
    root = quick / "run"
    store = make_store(kind, root)
    log, _ = open_log(store, this_process())
    for _ in range(3):
        write(log, [2, 1])
        log.snapshot(Snapshot(log.durable, b"%d" % log.durable))
    write(log, [1])
    log.close()
    snapshots = sorted((root / "journal").glob("snapshot-*"))
    assert [path.name for path in snapshots] == ["snapshot-000000000006.json", "snapshot-000000000009.json"]
    for path in reversed(snapshots):
        whole = path.read_bytes()
        for cut in range(len(whole.rstrip(b"\n"))):
            path.write_bytes(whole[:cut])
            assert recovered(store) == records(10)
        path.write_bytes(whole[:20] + b"0" + whole[21:])
        assert recovered(store) == records(10)
    for path in snapshots:
        path.unlink()
    assert recovered(store) == records(10)


def test_what_lies_before_a_snapshot_is_not_read_to_resume(kind: str, quick: Path) -> None:
    root = quick / "run"
    store = make_store(kind, root)
    log, _ = open_log(store, this_process())
    write(log, [3, 3])
    log.snapshot(Snapshot(6, b"6"))
    write(log, [2])
    log.close()
    log, _ = open_log(store, this_process())
    write(log, [2])
    log.snapshot(Snapshot(9, b"9"))
    write(log, [1])
    log.close()
    before = sorted((root / "journal").glob("0*"))[:2]
    for path in before:
        path.write_bytes(b"gone")
    log, replay = open_log(store, this_process())
    assert replay.snapshot == Snapshot(9, b"9")
    assert list(replay.records) == records(11)[9:]
    log.close()
    with pytest.raises(JournalError):
        list(read_records(store))


def test_a_snapshot_outlives_the_records_that_it_holds(kind: str, quick: Path) -> None:
    root = quick / "run"
    store = make_store(kind, root)
    log, _ = open_log(store, this_process())
    write(log, [3, 3])
    log.snapshot(Snapshot(6, b"6"))
    log.close()
    for path in sorted((root / "journal").glob("0*")):
        path.unlink()
    assert recovered(store) == records(6)
    log, _ = open_log(store, this_process())
    write(log, [2])
    log.close()
    assert recovered(store) == records(8)


def test_only_what_is_durable_goes_into_a_snapshot(store: Store) -> None:
    log, _ = open_log(store, this_process())
    log.append(record(1))
    with pytest.raises(ValueError, match="sync first"):
        log.snapshot(Snapshot(1, b"1"))
    log.close()


def test_nothing_is_lost_between_a_thread_that_appends_and_one_that_syncs(store: Store, hasty_threads: None) -> None:
    log, _ = open_log(store, this_process())
    done = threading.Event()

    def append() -> None:
        for number in range(1, 20_001):
            assert log.append(record(number)) == number
        done.set()

    appending = threading.Thread(target=append)
    appending.start()
    while not done.is_set():
        assert log.sync() <= log.position
    appending.join()
    assert log.sync() == 20_000
    log.close()
    assert list(read_records(store)) == records(20_000)


def test_what_is_sealed_is_durable_before_the_seal(quick: Path) -> None:
    calls: list[str] = []

    class Watched(FileStore):
        def flush(self, key: str) -> None:
            calls.append(f"flush {key}")
            super().flush(key)

        def appender(self, key: str) -> FileAppender:
            calls.append(f"open {key}")
            return super().appender(key)

    store = Watched(quick / "run")
    for _ in range(2):
        log, _ = open_log(store, this_process())
        write(log, [3])
        log.close()
    first, second = "journal/000001-000000000000.log", "journal/000002-000000000003.log"
    assert calls == [f"open {first}", f"flush {first}", f"open {second}"]


def test_a_missing_segment_is_damage_and_said(quick: Path) -> None:
    store = make_store("segments", quick / "run")
    log, _ = open_log(store, this_process())
    write(log, [1, 1, 1])
    log.close()
    store.delete("journal/000000000003.seg")
    with pytest.raises(JournalError, match=r"segment .* is missing.*000000000003\.seg"):
        list(read_records(store))


def test_a_large_journal_goes_on_in_further_files(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.journal.file_log.PART_BYTES", 1000)
    store = FileStore(quick / "run")
    log, _ = open_log(store, this_process())
    write(log, [5] * 20)
    log.close()
    assert len(store.keys("journal")) > 5
    assert recovered(store) == records(100)


def test_a_run_copied_from_files_to_a_bucket_goes_on_there_and_back(quick: Path) -> None:
    files = FileStore(quick / "run")
    log, _ = open_log(files, this_process())
    write(log, [3])
    log.close()
    bucket = open_store("memory://copied-journal")
    for key in files.keys(""):
        bucket.put(key, files.read(key))
    log, replay = open_log(bucket, this_process())
    assert list(replay.records) == records(3)
    write(log, [2])
    log.close()
    assert list(read_records(bucket)) == recovered(bucket) == records(5)
    back = FileStore(quick / "back")
    for key in bucket.keys(""):
        back.put(key, bucket.read(key))
    log, _ = open_log(back, this_process())
    write(log, [1])
    log.close()
    assert list(read_records(back)) == recovered(back) == records(6)


def test_a_damaged_journal_is_not_held_by_the_driver_that_found_it_so(store: Store) -> None:
    log, _ = open_log(store, this_process())
    write(log, [1, 1, 1])
    log.close()
    [key] = [key for key in store.keys("journal") if key.startswith(("journal/000001-", "journal/000000000004"))]
    whole = store.read(key)
    store.put(key, whole[10:])
    with pytest.raises(JournalError, match="damaged"):
        open_log(store, this_process())
    store.put(key, whole)
    assert recovered(store) == records(3)
