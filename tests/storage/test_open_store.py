"""From a URI to a store."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.errors import ConfigurationError
from holdfast.storage.files import FileStore
from holdfast.storage.store import open_store


def test_local_paths_and_file_uris_are_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    expected = {
        str(tmp_path / "run"): tmp_path / "run",
        str(tmp_path / "run") + "/": tmp_path / "run",
        "run/../run": tmp_path / "run",
        "~/runs": Path("/home/somebody/runs"),
        f"file://{tmp_path}/a%20b": tmp_path / "a b",
        f"file://localhost{tmp_path}/x": tmp_path / "x",
    }
    for uri, root in expected.items():
        store = open_store(uri)
        assert isinstance(store, FileStore)
        assert store.root == root
        assert open_store(store.uri).uri == store.uri
    assert open_store(tmp_path).uri == str(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_buckets_are_known_by_their_scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    for uri in ("s3://bucket", "gs://bucket", "az://container"):
        assert open_store(uri).uri == uri
        assert open_store(f"{uri}/").uri == uri
        assert open_store(f"{uri}/deep/path/").uri == f"{uri}/deep/path"
        assert open_store(uri).child("run").uri == f"{uri}/run"


def test_memory_is_shared_by_its_name() -> None:
    open_store("memory://shared/run").put("key", b"x")
    assert open_store("memory://shared").read("run/key") == b"x"


@pytest.mark.parametrize("uri", ["ftp://host/path", "S4://bucket", "http://x"])
def test_an_unknown_scheme_lists_what_is_accepted(uri: str) -> None:
    with pytest.raises(ConfigurationError, match=r"local path, file:///path, s3://.*gs://.*az://"):
        open_store(uri)


@pytest.mark.parametrize("uri", ["", "  ", "s3://", "s3:///path", "file://host/path"])
def test_a_uri_that_names_no_place_is_refused(uri: str) -> None:
    with pytest.raises(ConfigurationError):
        open_store(uri)


def test_a_path_through_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file", tmp_path / "file" / "below" / "it"):
        with pytest.raises(ConfigurationError, match="is a file, not a folder"):
            open_store(path)


def test_a_store_on_files_never_loads_obstore(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom holdfast.storage.store import open_store\n"
        f"open_store({str(tmp_path)!r}).put('key', b'x')\n"
        "assert 'obstore' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
