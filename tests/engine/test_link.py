"""The agent's end of a zygote's socket."""

from __future__ import annotations

import asyncio
import errno
import socket
from typing import Any

import pytest

from holdfast.engine import zygote as z
from holdfast.engine.link import Link


def test_a_request_that_cannot_be_sent_is_not_taken_for_a_dead_zygote(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(z, "MAX_MESSAGE", 1 << 30)

    async def main() -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: told.append(context))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        passed, other = socket.socketpair()
        link = Link(loop, ours)
        link.send(z.Fork(1, "x" * (8 << 20), {}, "module:function"), passed)
        assert passed.fileno() < 0
        link.close()
        theirs.close()
        other.close()
        return told

    (context,) = asyncio.run(main())
    assert "cannot be sent to the process that workers are forked from" in context["message"]
    assert context["exception"].errno == errno.EMSGSIZE
