"""The agent's end of a zygote's socket: requests with a socket each, answers with a pidfd. It must never block."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Iterator

import msgspec

from holdfast.engine import zygote as z


class Link:
    """See the module's docstring. What would block waits in a queue."""

    def __init__(self, loop: asyncio.AbstractEventLoop, end: socket.socket) -> None:
        end.setblocking(False)
        self._loop = loop
        self._end = end
        self._queue: deque[tuple[bytes, socket.socket]] = deque()
        self._answers: msgspec.msgpack.Decoder[z.Answer] = msgspec.msgpack.Decoder(z.Answer)
        self.ended = False

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, request: z.Request, passed: socket.socket) -> None:
        """Send a request with a socket, which is closed here."""
        self._queue.append((msgspec.msgpack.encode(request), passed))
        if len(self._queue) == 1:
            self._flush()

    def _flush(self) -> None:
        while self._queue:
            data, passed = self._queue[0]
            try:
                socket.send_fds(self._end, [data], [passed.fileno()])
            except BlockingIOError:
                self._loop.add_writer(self._end, self._flush)
                return
            except OSError:  # the zygote is gone; its pidfd and the end of this stream tell
                self._drop_queue()
                break
            passed.close()
            self._queue.popleft()
        self._loop.remove_writer(self._end)

    def receive(self) -> Iterator[tuple[z.Answer, int]]:
        """What has arrived, each with its pidfd or -1."""
        while not self.ended:
            try:
                data, fds, _, _ = socket.recv_fds(self._end, z.MAX_MESSAGE, 1, socket.MSG_CMSG_CLOEXEC)
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
        for _, passed in self._queue:
            passed.close()
        self._queue.clear()
