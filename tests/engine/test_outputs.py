"""What a worker prints is passed on line by line, at the pace at which it is printed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from holdfast.engine.outputs import LIMIT, LONGEST_LINE, LogTail


class Log:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.touch()

    def write(self, text: str) -> None:
        with self.path.open("a", newline="") as file:
            file.write(text)


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "rank_0.log")


def test_an_unfinished_line_waits_for_its_end_or_the_last_look(log: Log) -> None:
    tail = LogTail(log.path)
    log.write("one\ntw")
    assert tail.read(last=False) == "one\n"
    log.write("o\nthree")
    assert tail.read(last=False) == "two\n"
    assert tail.read(last=True) == "three"


def test_a_progress_bar_is_passed_on_as_it_moves(log: Log) -> None:
    tail = LogTail(log.path)
    seen = []
    for step in range(4):
        log.write(f"\r{step}/4")
        seen += tail.read(last=False).splitlines()
    assert seen == ["0/4", "1/4", "2/4"]
    log.write("\r4/4\n")
    seen += tail.read(last=False).splitlines()
    assert seen == ["0/4", "1/4", "2/4", "3/4", "4/4"]


def test_a_newline_of_two_characters_is_one(log: Log) -> None:
    tail = LogTail(log.path)
    log.write("one\r")
    first = tail.read(last=False)
    log.write("\ntwo\r\n")
    assert (first + tail.read(last=False)).splitlines() == ["one", "two"]


def test_who_prints_faster_than_can_be_passed_on_is_not_followed_behind(log: Log) -> None:
    tail = LogTail(log.path)
    log.write("early\nbegun")
    assert tail.read(last=False) == "early\n"
    log.write("x" * 99 + "\n")
    log.write(("y" * 99 + "\n") * (10 * LIMIT // 100) + "newest\n")
    text = tail.read(last=False)
    assert text.startswith("begun\n… ")
    assert " bytes skipped\n" in text
    assert text.endswith("newest\n")
    assert len(text) < LIMIT + 100
    assert tail.read(last=False) == ""


def test_a_line_without_end_is_passed_on_in_pieces(log: Log) -> None:
    tail = LogTail(log.path)
    passed = ""
    began = time.monotonic()
    for _ in range(1000):
        log.write("x" * (LIMIT // 2))
        text = tail.read(last=False)
        passed += text
        assert len(text) >= LIMIT // 2 - LONGEST_LINE
    assert time.monotonic() - began < 5.0
    assert len(passed) == 1000 * (LIMIT // 2)
