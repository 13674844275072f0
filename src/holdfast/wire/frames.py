"""Bytes of a stream: each frame is a four byte length and a msgpack message, or a *row*.

A row is the JSON text of one metrics-only report. It is marked in the length's top bit and travels verbatim, so that a
hundred thousand of them a second cost the processes on the way a slice each and no decoding.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

from holdfast.errors import WireError
from holdfast.wire import messages as m

MAX_FRAME = 1 << 30
ROW = 1 << 31
_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()

M = TypeVar("M")


def frame(message: m.Message) -> bytes:
    """One framed message."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME:
        raise WireError(f"a {type(message).__name__} of {len(body)} bytes is over the limit of {MAX_FRAME}")
    return _LENGTH.pack(len(body)) + body


def row_frame(row: bytes) -> bytes:
    """One framed row."""
    return _LENGTH.pack(len(row) | ROW) + row


class FrameReader(Generic[M]):
    """Cuts what arrives into messages of the expected type; keeps what is incomplete."""

    def __init__(self, expected: object) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(expected)
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[M | list[bytes]]:
        """Yield each message, and each unbroken run of rows as one list. The caller must take them all."""
        if self._rest:
            data = self._rest + data
        position, end = 0, len(data)
        rows: list[bytes] = []
        unpack = _LENGTH.unpack_from
        while end - position >= 4:
            (length,) = unpack(data, position)
            size = length & ~ROW
            if size > MAX_FRAME:
                raise WireError(f"a frame of {size} bytes is over the limit of {MAX_FRAME}")
            stop = position + 4 + size
            if stop > end:
                break
            if length & ROW:
                rows.append(data[position + 4 : stop])
                position = stop
                continue
            if rows:
                yield rows
                rows = []
            yield self._decode(data[position + 4 : stop])
            position = stop
        self._rest = data[position:]
        if rows:
            yield rows

    def _decode(self, body: bytes) -> M:
        try:
            return self._decoder.decode(body)
        except msgspec.DecodeError as error:
            raise WireError(f"not a message of ours: {error}") from None
