"""Channels authenticate both ends and carry messages in order, over unix sockets and TCP alike."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from holdfast.errors import WireError
from holdfast.wire import messages as m
from holdfast.wire.channel import HIGH_WATER, Channel, connect, serve
from holdfast.wire.handshake import new_secret


@pytest.fixture(params=["unix", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"unix:{tmp_path}/s" if request.param == "unix" else "tcp:127.0.0.1:0"


async def pair(address: str, use: Callable[[Channel, Channel], Awaitable[None]]) -> None:
    secret = new_secret()
    arrived: asyncio.Future[Channel] = asyncio.get_running_loop().create_future()

    async def on_peer(channel: Channel) -> None:
        arrived.set_result(channel)

    server, where = await serve(address, secret, m.FromAgent, on_peer)
    try:
        agent = await connect(where, secret, m.ToAgent)
        controller = await arrived
        await use(controller, agent)
        await agent.close()
        await controller.close()
    finally:
        server.close()
        await server.wait_closed()


def test_messages_arrive_in_order_both_ways(address: str) -> None:
    async def use(controller: Channel, agent: Channel) -> None:
        sent = [m.Output("g", 1, rank, "x" * rank) for rank in range(2000)]
        heard: list[object] = []
        answers: list[object] = []
        for message in sent:
            agent.send(message)
        controller.send(m.KillGroup("g", 1))
        await agent.drained()
        agent._writer.write_eof()
        assert await controller.listen(heard.append) == "its connection ended"
        assert await agent.listen(answers.append) == "its connection ended"
        assert heard == sent
        assert answers == [m.KillGroup("g", 1)]

    asyncio.run(pair(address, use))


def test_a_stranger_is_refused_by_both_ends(address: str) -> None:
    async def main() -> None:
        async def on_peer(channel: Channel) -> None:
            raise AssertionError("a stranger was let in")

        server, where = await serve(address, new_secret(), m.FromAgent, on_peer)
        try:
            with pytest.raises(WireError, match=r"does not know this job's secret|did not finish"):
                await connect(where, new_secret(), m.ToAgent)
        finally:
            server.close()
            await server.wait_closed()

    asyncio.run(main())


def test_a_peer_that_is_not_read_makes_the_sender_congested(address: str) -> None:
    async def use(controller: Channel, agent: Channel) -> None:
        block = m.Output("g", 1, 0, "x" * 100_000)
        while not agent.congested:
            agent.send(block)
            await asyncio.sleep(0)
        heard: list[object] = []
        listening = asyncio.create_task(controller.listen(heard.append))
        await agent.drained()
        assert not agent.congested
        assert len(heard) * 100_000 > HIGH_WATER / 2
        await agent.close()
        await listening

    asyncio.run(pair(address, use))


def test_garbage_ends_the_connection(address: str) -> None:
    async def use(controller: Channel, agent: Channel) -> None:
        agent._writer.write(b"\x05\x00\x00\x00junk!")
        assert "not a message of ours" in await controller.listen(lambda message: None)

    asyncio.run(pair(address, use))


def test_a_channel_that_is_closed_ends_though_another_process_keeps_its_socket(address: str) -> None:
    async def use(controller: Channel, agent: Channel) -> None:
        kept = os.dup(controller._writer.get_extra_info("socket").fileno())  # as a fork would
        try:
            sent = [m.Program("p", b"x" * (8 << 20)), m.KillGroup("g", 1)]
            heard: list[object] = []
            for message in sent:
                controller.send(message)  # type: ignore[arg-type]
            listening = asyncio.create_task(agent.listen(heard.append))
            await controller.close()
            async with asyncio.timeout(5.0):
                await listening
            assert heard == sent
        finally:
            os.close(kept)

    asyncio.run(pair(address, use))


def test_nothing_is_read_before_the_listener_is_ready(address: str) -> None:
    async def use(controller: Channel, agent: Channel) -> None:
        ready = asyncio.Event()
        heard: list[object] = []
        listening = asyncio.create_task(controller.listen(heard.append, ready.wait))
        block = m.Output("g", 1, 0, "x" * 100_000)
        while not agent.congested:
            agent.send(block)
            await asyncio.sleep(0)
        assert heard == []
        ready.set()
        await agent.drained()
        assert heard
        await agent.close()
        await listening

    asyncio.run(pair(address, use))
