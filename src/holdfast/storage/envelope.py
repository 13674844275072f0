"""A JSON document that knows whether it is whole: ``{"checksum": "…", "body": …}``.

A document that was cut, or changed by a single bit, does not open. This module must never guess at a broken one.
"""

from __future__ import annotations

import msgspec
import xxhash


class _Envelope(msgspec.Struct, frozen=True):
    checksum: str
    body: msgspec.Raw


_decoder = msgspec.json.Decoder(_Envelope)


def seal(body: bytes) -> bytes:
    """Wrap JSON text."""
    return b'{"checksum":"%b","body":%b}\n' % (xxhash.xxh3_64_hexdigest(body).encode(), body)


def unseal(data: bytes) -> bytes | None:
    """The JSON text that was wrapped; None when it is not what was written."""
    try:
        envelope = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    body = bytes(envelope.body)
    return body if xxhash.xxh3_64_hexdigest(body) == envelope.checksum else None
