"""The asyncio end of an authenticated stream of messages, over unix sockets and TCP alike.

An address is ``unix:/path`` or ``tcp:host:port``. Messages arrive in order through a callback; what is sent while the
peer is slow is kept, and ``congested`` tells the sender to stop reading from its own sources until ``drained``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from holdfast.errors import ConfigurationError, WireError
from holdfast.wire.frames import FrameReader, frame
from holdfast.wire.handshake import greet
from holdfast.wire.messages import Message

CHUNK = 1 << 18
HIGH_WATER = 1 << 21
CONTROLLER, AGENT = b"controller", b"agent"


class Channel:
    """One end. ``listen`` reads until the peer is gone and then says why."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, expected: object) -> None:
        self._reader = reader
        self._writer = writer
        self._frames: FrameReader[Any] = FrameReader(expected)
        writer.transport.set_write_buffer_limits(high=HIGH_WATER)

    def send(self, message: Message) -> None:
        """Send, or drop when the peer is gone; its loss is told by ``listen``."""
        if not self._writer.is_closing():
            self._writer.write(frame(message))

    @property
    def congested(self) -> bool:
        return self._writer.transport.get_write_buffer_size() > HIGH_WATER

    async def drained(self) -> None:
        with contextlib.suppress(OSError):
            await self._writer.drain()

    async def listen(
        self, on_message: Callable[[Any], None], ready: Callable[[], Awaitable[object]] | None = None
    ) -> str:
        """Hand over each message until the stream ends; why it ended. Nothing is read before ``ready`` says so, each
        time: the peer is held back meanwhile.
        """
        try:
            while True:
                if ready is not None:
                    await ready()
                data = await self._reader.read(CHUNK)
                if not data:
                    break
                for message in self._frames.feed(data):
                    on_message(message)
        except (OSError, WireError) as error:
            return f"its connection failed: {error}"
        finally:
            self._writer.close()
        return "its connection ended"

    def hang_up(self) -> None:
        """Close without waiting; ``listen`` then ends at both ends."""
        self._writer.transport.abort()

    async def close(self) -> None:
        """Close after what was sent has left. The peer sees it, even where a process that was forked from this one
        has kept the socket.
        """
        stream = None
        with contextlib.suppress(OSError):
            stream = socket.socket(fileno=os.dup(self._writer.get_extra_info("socket").fileno()))
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError:
            pass
        finally:
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.shutdown(socket.SHUT_RDWR)
                stream.close()


async def connect(address: str, secret: bytes, expected: object) -> Channel:
    """Connect to a controller as an agent."""
    kind, _, rest = address.partition(":")
    if kind == "unix":
        reader, writer = await asyncio.open_unix_connection(rest, limit=CHUNK)
    elif kind == "tcp":
        host, _, port = rest.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=CHUNK)
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    else:
        raise ConfigurationError(f"address {address!r} is neither unix:PATH nor tcp:HOST:PORT")
    channel = Channel(reader, writer, expected)
    try:
        await greet(reader, writer, secret, role=AGENT, peer=CONTROLLER)
    except WireError:
        await channel.close()
        raise
    return channel


async def serve(
    address: str, secret: bytes, expected: object, on_peer: Callable[[Channel], Awaitable[None]]
) -> tuple[asyncio.Server, str]:
    """Listen for agents; strangers are dropped. The server, and the address that agents connect to."""

    async def welcome(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = Channel(reader, writer, expected)
        try:
            await greet(reader, writer, secret, role=CONTROLLER, peer=AGENT)
        except WireError:
            await channel.close()
            return
        await on_peer(channel)

    kind, _, rest = address.partition(":")
    if kind == "unix":
        return await asyncio.start_unix_server(welcome, rest, limit=CHUNK), address
    host, _, port = rest.rpartition(":")
    server = await asyncio.start_server(welcome, host, int(port), limit=CHUNK)
    return server, f"tcp:{host}:{server.sockets[0].getsockname()[1]}"
