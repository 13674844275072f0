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
        self._parts: list[bytes] = []
        self._held = 0
        self._needed = 4
        """Nothing can be cut off before so many bytes are held; joining them earlier would copy them each time."""

    def feed(self, data: bytes) -> Iterator[M | list[bytes]]:
        """Yield each message, and each unbroken run of rows as one list. The caller must take them all."""
        self._parts.append(data)
        self._held += len(data)
        if self._held < self._needed:
            return
        data = b"".join(self._parts) if len(self._parts) > 1 else data
        position, end, needed = 0, len(data), 4
        rows: list[bytes] = []
        unpack = _LENGTH.unpack_from
        while end - position >= 4:
            (length,) = unpack(data, position)
            size = length & ~ROW
            if size > MAX_FRAME:
                raise WireError(f"a frame of {size} bytes is over the limit of {MAX_FRAME}")
            stop = position + 4 + size
            if stop > end:
                needed = 4 + size
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
        self._parts, self._held, self._needed = [data[position:]], end - position, needed
        if rows:
            yield rows

    def _decode(self, body: bytes) -> M:
        try:
            return self._decoder.decode(body)
        except msgspec.DecodeError as error:
            raise WireError(f"not a message of ours: {error}") from None
