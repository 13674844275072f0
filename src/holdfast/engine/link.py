"""The agent's end of a zygote's socket: requests with a socket each, answers with a pidfd. It must never block."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections import deque
from collections.abc import Iterator

import msgspec

from holdfast.engine import zygote as z

_REFUSALS = frozenset((errno.EMSGSIZE, errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS))


class Link:
    """See the module's docstring. What would block waits in a queue."""

    def __init__(self, loop: asyncio.AbstractEventLoop, end: socket.socket) -> None:
        end.setblocking(False)
        self._loop = loop
        self._end = end
        self._queue: deque[tuple[bytes, int, socket.socket]] = deque()
        self._answers: msgspec.msgpack.Decoder[z.Answer] = msgspec.msgpack.Decoder(z.Answer)
        self.ended = False

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, request: z.Request, passed: socket.socket) -> None:
        """Send a request with a socket, which is closed here. OSError when there is no room to pack it in."""
        if self._end.fileno() < 0:
            passed.close()
            return
        self._queue.append((*z.pack(request), passed))
        if len(self._queue) == 1:
            self._flush()

    def _flush(self) -> None:
        while self._queue:
            data, memory, passed = self._queue[0]
            try:
                socket.send_fds(self._end, [data], [passed.fileno()] if memory < 0 else [passed.fileno(), memory])
            except BlockingIOError:
                self._loop.add_writer(self._end, self._flush)
                return
            except OSError as error:
                self._drop_queue()
                if error.errno in _REFUSALS:
                    self._fail(error)
                break  # else the zygote is gone; its pidfd and the end of this stream tell
            self._drop_first()
        self._loop.remove_writer(self._end)

    def _fail(self, error: OSError) -> None:
        """The zygote lives and waits for what cannot be sent: the agent must not wait with it."""
        message = f"a request cannot be sent to the process that workers are forked from: {error}"
        self._loop.call_exception_handler({"message": message, "exception": error})

    def receive(self) -> Iterator[tuple[z.Answer, int]]:
        """What has arrived, each with its pidfd or -1."""
        while not self.ended:
            try:
                data, fds = z.receive(self._end)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            if data:
                yield self._answers.decode(data), (fds[0] if fds else -1)
            else:
                self.ended = True

    def close(self) -> None:
        if self._end.fileno() >= 0:
            self._loop.remove_reader(self._end)
            self._loop.remove_writer(self._end)
            self._end.close()
        self._drop_queue()

    def _drop_queue(self) -> None:
        while self._queue:
            self._drop_first()

    def _drop_first(self) -> None:
        _, memory, passed = self._queue.popleft()
        passed.close()
        if memory >= 0:
            os.close(memory)
