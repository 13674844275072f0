"""The documentation is true: its code runs, its links lead somewhere, and the names that it names exist."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    str(path.relative_to(ROOT)) for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")) if path.is_file()
)
SCRIPTS = ["README.md", "docs/from-ray-train.md", "docs/guide.md", "docs/testing.md"]
TIMEOUT_S = 50


def code_in(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def prose_in(page: str) -> str:
    return re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", SCRIPTS)
def test_the_code_of_a_page_is_a_script_that_runs(page: str, tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    script.write_text("\n".join(code_in(page, "python")))
    ended = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=tmp_path,
        env=os.environ | {"HOME": str(tmp_path), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert not ended.stderr


def test_every_page_with_code_is_run() -> None:
    assert [page for page in PAGES if code_in(page, "python")] == SCRIPTS


def test_the_readme_shows_the_quickstart() -> None:
    quickstart = (ROOT / "examples/quickstart.py").read_text()
    (shown,) = code_in("README.md", "python")
    assert quickstart.partition("\n\n")[2] == shown


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    lost = [link for link in _links(page) if not _leads_somewhere(ROOT / page, link)]
    assert lost == []


@pytest.mark.parametrize("page", PAGES)
def test_names_of_the_code_exist(page: str) -> None:
    """``control/commit.py:settle`` is a function of ours, ``tests/a.py::test_b`` a test, ``docs/guide.md`` a file."""
    unknown = [name for name in re.findall(r"`([^`\s]+)`", prose_in(page)) if not _exists(name)]
    assert unknown == []


@pytest.mark.parametrize("page", [page for page in PAGES if re.search(r"docs/decisions/\d", page)])
def test_a_decision_has_its_three_parts_and_is_short(page: str) -> None:
    text = (ROOT / page).read_text()
    assert text.startswith(f"# {Path(page).name[:3]}: ")
    assert re.findall(r"^\*\*(\w+)\.\*\*", text, re.MULTILINE) == ["Context", "Decision", "Consequence"]
    assert len(text.splitlines()) <= 25


def test_the_index_of_decisions_is_complete() -> None:
    folder = ROOT / "docs/decisions"
    index = (folder / "README.md").read_text()
    expected = [
        f"| [{path.name[:3]}]({path.name}) | {path.read_text().partition(': ')[2].partition(chr(10))[0]} |"
        for path in sorted(folder.glob("[0-9]*.md"))
    ]
    assert [line for line in index.splitlines() if line.startswith("| [")] == expected


def _links(page: str) -> Iterator[str]:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose_in(page)):
        if not re.match(r"[a-z]+:", link):
            yield link


def _leads_somewhere(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.exists():
        return False
    return not anchor or anchor in _anchors(target)


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _exists(name: str) -> bool:
    if match := re.fullmatch(r"([\w./-]+\.py)(?:::?([\w.]+))?", name):
        path = next((place for place in (ROOT / match[1], ROOT / "src/holdfast" / match[1]) if place.is_file()), None)
        return path is not None and (match[2] is None or match[2] in _names(path))
    if re.fullmatch(r"(docs|tests|examples|bench|src)/[\w./-]*", name):
        return (ROOT / name).exists()
    return True


@functools.cache
def _names(path: Path) -> frozenset[str]:
    """Every function, class, method and constant of a module."""
    return frozenset(_names_below(ast.parse(path.read_text()), ""))


def _names_below(node: ast.AST, prefix: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + child.name
            if isinstance(child, ast.ClassDef):
                yield from _names_below(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.Assign):
            yield from (prefix + target.id for target in child.targets if isinstance(target, ast.Name))
