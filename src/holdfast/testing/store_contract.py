"""What every store must pass. Subclass ``StoreContract`` in a test module and give it ``make_store``."""

from __future__ import annotations

import os
import secrets
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from holdfast.errors import MissingError, StorageError
from holdfast.storage.store import MANIFEST, SourceError, Store, honours_create

BAD_KEYS = ("", "/", "/a", "a/", "a//b", "..", "../a", "a/../b", ".", "a/./b", "a\0b")
ODD_NAMES = ("a b", "ünï.bin", "50%", "a%2Fb", "#1", "q?x=1", "[x]{y}~", "back\\slash", ".hidden", "..x", "c:d", "*")


class StoreContract(ABC):
    """The promises of ``holdfast.storage.store``, as tests."""

    @abstractmethod
    def make_store(self) -> Store:
        """A store that holds nothing."""

    def test_what_was_put_is_read(self) -> None:
        store = self.make_store()
        store.put("a/b/c", b"one")
        store.put("a/b/c", b"two")
        assert store.read("a/b/c") == b"two"
        assert store.size("a/b/c") == 3
        assert store.head("a/b/c", 2) == b"tw"
        assert store.head("a/b/c", 100) == b"two"
        assert store.exists("a/b/c")

    def test_many_keys_are_read_in_their_order(self) -> None:
        store = self.make_store()
        keys = [f"many/{number}" for number in range(70)]
        for key in keys:
            store.put(key, key.encode())
        assert list(store.read_many(keys[::-1])) == [key.encode() for key in reversed(keys)]
        assert list(store.read_many([])) == []
        _refused(MissingError, lambda: list(store.read_many([*keys, "gone"])))

    def test_nothing_is_a_thing_of_its_own(self) -> None:
        store = self.make_store()
        store.put("empty", b"")
        assert store.read("empty") == b""
        assert store.head("empty", 10) == b""
        assert store.exists("empty")
        assert store.checksum("empty").size == 0

    def test_what_is_not_there_is_missing(self) -> None:
        store = self.make_store()
        store.put("folder/file", b"x")
        for key in ("nothing", "folder", "folder/file/below", "folder/other"):
            assert not store.exists(key)
            for call in (store.read, store.size, store.checksum):
                _refused(MissingError, call, key)
            store.delete(key)
        assert store.keys("nothing") == []
        assert store.folders("nothing") == []
        store.delete_tree("nothing")
        assert store.keys("") == ["folder/file"]

    def test_create_writes_once(self) -> None:
        store = self.make_store()
        assert store.create("deep/er/key", b"first") is True
        assert store.create("deep/er/key", b"second") is False
        assert store.read("deep/er/key") == b"first"
        store.delete("deep/er/key")
        assert store.create("deep/er/key", b"third") is True
        assert store.keys("") == ["deep/er/key"]

    def test_of_many_creators_exactly_one_wins(self) -> None:
        store = self.make_store()
        for turn in range(10):
            start = threading.Barrier(8)
            won: list[bytes] = []

            def create(name: bytes, turn: int = turn, start: threading.Barrier = start, won: list[bytes] = won) -> None:
                start.wait()
                if store.create(f"race/{turn}", name):
                    won.append(name)

            threads = [threading.Thread(target=create, args=(b"%d" % number,)) for number in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert won == [store.read(f"race/{turn}")]

    def test_it_honours_create_and_the_probe_leaves_nothing(self) -> None:
        store = self.make_store()
        assert honours_create(store, "epochs")
        assert store.keys("") == []

    def test_a_reader_sees_the_old_bytes_or_the_new_ones(self) -> None:
        store = self.make_store()
        versions = [bytes([65 + number]) * 200_000 for number in range(2)]
        store.put("key", versions[0])
        done = threading.Event()

        def write() -> None:
            for turn in range(40):
                store.put("key", versions[turn % 2])
            done.set()

        writer = threading.Thread(target=write)
        writer.start()
        while not done.is_set():
            assert store.read("key") in versions
            assert store.keys("") == ["key"]
        writer.join()

    def test_keys_are_listed_below_a_folder_and_sorted(self) -> None:
        store = self.make_store()
        for key in ("b/2", "b/1", "b/deep/x", "bb/1", "a"):
            store.put(key, b"")
        assert store.keys("") == ["a", "b/1", "b/2", "b/deep/x", "bb/1"]
        assert store.keys("b") == store.keys("b/") == ["b/1", "b/2", "b/deep/x"]
        assert store.folders("") == ["b", "bb"]
        assert store.folders("b") == ["deep"]

    def test_a_tree_is_deleted_and_its_neighbours_are_not(self) -> None:
        store = self.make_store()
        for key in (f"run/{MANIFEST}", "run/model", "run/sub/more", f"run/sub/{MANIFEST}", "runs/other", "z"):
            store.put(key, b"x")
        store.delete_tree("run")
        assert store.keys("") == ["runs/other", "z"]
        assert store.folders("") == ["runs"]
        store.put("run/model", b"again")
        assert store.keys("run") == ["run/model"]

    def test_a_child_is_the_folder(self) -> None:
        store = self.make_store()
        child = store.child("runs/one")
        child.put("a/b", b"x")
        assert store.read("runs/one/a/b") == b"x"
        assert child.keys("") == ["a/b"]
        assert child.folders("") == ["a"]
        assert child.uri == f"{store.uri}/runs/one"
        child.delete_tree("a")
        assert store.keys("") == []

    def test_keys_that_lead_elsewhere_are_refused(self) -> None:
        store = self.make_store()
        with _file(b"x") as source:
            for key in BAD_KEYS:
                for call in (store.read, store.exists, store.delete, store.child, store.checksum):
                    _refused(StorageError, call, key)
                _refused(StorageError, lambda key=key: store.put(key, b""))
                _refused(StorageError, lambda key=key: store.create(key, b""))
                _refused(StorageError, lambda key=key: store.put_file(source, key))
            for prefix in ("..", "/", "a/../..", "a//"):
                for act in (store.keys, store.folders, store.delete_tree, store.settle):
                    _refused(StorageError, act, prefix)
        assert store.keys("") == []

    def test_odd_names_are_kept(self) -> None:
        store = self.make_store()
        for name in ODD_NAMES:
            store.put(f"odd/{name}", name.encode())
        assert store.keys("odd") == sorted(f"odd/{name}" for name in ODD_NAMES)
        assert [store.read(f"odd/{name}") for name in ODD_NAMES] == [name.encode() for name in ODD_NAMES]

    def test_a_file_is_copied_in_and_out_with_its_checksum(self) -> None:
        store = self.make_store()
        for size in (0, 1, 1 << 20, (5 << 20) + 3):
            data = secrets.token_bytes(size)
            with _file(data) as source:
                entry = store.put_file(source, "folder/model.bin")
                store.settle("folder")
                assert (entry.name, entry.size) == ("model.bin", size)
                assert entry.checksum == xxhash.xxh3_64_hexdigest(data)
                assert store.read("folder/model.bin") == data
                assert store.checksum("folder/model.bin") == entry
                target = source.with_suffix(".copy")
                assert store.fetch_file("folder/model.bin", target) == entry
                assert target.read_bytes() == data

    def test_a_source_that_cannot_be_read_is_told_apart_and_leaves_nothing(self) -> None:
        store = self.make_store()
        with _file(b"x") as source:
            os.mkfifo(source.parent / "pipe")
            for path in (source.parent / "gone", source.parent, source.parent / "pipe"):
                _refused(SourceError, store.put_file, path, "folder/file")
        assert store.keys("") == []

    def test_an_appender_appends_to_a_new_file_only(self) -> None:
        store = self.make_store()
        appender = store.appender("journal/log")
        assert (appender is not None) == store.appends
        if appender is None:
            return
        try:
            appender.append(b"one,")
            appender.append(b"two")
            appender.sync()
            assert store.read("journal/log") == b"one,two"
            store.flush("journal/log")
            assert store.is_held("journal/log") in (True, None)
            _refused(StorageError, store.appender, "journal/log")
        finally:
            appender.close()
        assert store.is_held("journal/log") in (False, None)
        assert store.read("journal/log") == b"one,two"


def _refused(kind: type[Exception], call: object, *arguments: object) -> None:
    assert callable(call)
    try:
        call(*arguments)
    except kind:
        return
    raise AssertionError(f"{call} took {arguments}")


@contextmanager
def _file(data: bytes) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="store-contract-") as folder:
        path = Path(folder, "source")
        path.write_bytes(data)
        yield path
