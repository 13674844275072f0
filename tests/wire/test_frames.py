"""Frames survive any cut of the stream, and nothing that is not ours passes for a message."""

from __future__ import annotations

import struct
import time

import pytest

from holdfast.errors import WireError
from holdfast.wire import messages as m
from holdfast.wire.frames import MAX_FRAME, FrameReader, frame, row_frame

STARTED = m.Started(7)
RETURN = m.Return(b"1", b"")


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 7, 1000])
def test_messages_and_rows_come_out_in_order_however_the_stream_is_cut(chunk: int) -> None:
    stream = frame(STARTED) + row_frame(b'{"a":1}') + row_frame(b"{}") + frame(RETURN) + row_frame(b'{"b":2}')
    reader: FrameReader[m.FromWorker] = FrameReader(m.FromWorker)
    found: list[object] = []
    for start in range(0, len(stream), chunk):
        for item in reader.feed(stream[start : start + chunk]):
            found.extend(item) if isinstance(item, list) else found.append(item)
    assert found == [STARTED, b'{"a":1}', b"{}", RETURN, b'{"b":2}']


def test_an_unbroken_run_of_rows_is_one_list() -> None:
    reader: FrameReader[m.FromWorker] = FrameReader(m.FromWorker)
    assert list(reader.feed(row_frame(b"{}") * 3 + frame(STARTED))) == [[b"{}"] * 3, STARTED]


def test_a_frame_that_is_no_message_is_refused() -> None:
    reader: FrameReader[m.FromWorker] = FrameReader(m.FromWorker)
    with pytest.raises(WireError, match="not a message of ours"):
        list(reader.feed(struct.pack("<I", 3) + b"abc"))


def test_a_message_of_the_other_direction_is_refused() -> None:
    reader: FrameReader[m.FromWorker] = FrameReader(m.FromWorker)
    with pytest.raises(WireError):
        list(reader.feed(frame(m.Advance(3))))


def test_a_frame_over_the_limit_is_refused_before_it_is_read() -> None:
    reader: FrameReader[m.FromWorker] = FrameReader(m.FromWorker)
    with pytest.raises(WireError, match="over the limit"):
        list(reader.feed(struct.pack("<I", MAX_FRAME + 1)))


def test_every_message_survives_the_wire() -> None:
    context = m.WorkerContext("run", "g", 1, 0, 2, 0, 2, 0, "node-0", "/tmp/x")
    start = m.StartWorker(context, "p", m.Environment(("numpy",), {"A": "1"}), "log", True, m.CheckpointRef(3, "c"))
    upload = m.Upload("g", 1, 0, 2, 3, "checkpoint_000003", "/tmp/x", ("a", "b"), 5.0)
    reader: FrameReader[m.ToAgent] = FrameReader(m.ToAgent)
    assert list(reader.feed(frame(start) + frame(upload))) == [start, upload]


def test_a_large_frame_in_small_pieces_costs_no_more_than_its_size() -> None:
    reader: FrameReader[m.FromWorker] = FrameReader(m.FromWorker)
    large = m.Return(b"x" * (64 << 20), b"")
    stream, piece = frame(large) + frame(STARTED), 64 << 10
    began = time.monotonic()
    found = [item for start in range(0, len(stream), piece) for item in reader.feed(stream[start : start + piece])]
    assert time.monotonic() - began < 2.0
    assert found == [large, STARTED]
