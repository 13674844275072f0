"""Nodes with real agents, the links between them and a driver, and the engine that a driver holds.

A link carries messages in order, each after its own delay, and may carry one to the driver twice. When a node is lost
some of what was on its way still arrives, then the loss is told, then nothing. It must never lose a message of a live
connection.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.control.failures import CONTROLLER_LIMIT, MAX_FAILURES, MAX_PREEMPTIONS
from holdfast.engine.agent import Agent
from holdfast.engine.base import Engine, Gang, Listener, Node
from holdfast.errors import EngineError
from holdfast.testing.simulation.clock import Process
from holdfast.testing.simulation.workers import PlayedProcesses
from holdfast.wire import messages as m

if TYPE_CHECKING:
    from holdfast.testing.simulation.world import World


class Link:
    """One direction between two processes."""

    def __init__(self, world: World, receiver: Process, heard: Callable[[m.Message], None], repeats: float) -> None:
        self._world = world
        self._receiver = receiver
        self._heard = heard
        self._repeats = repeats
        self._last = 0.0
        self._ends = float("inf")

    def send(self, message: m.Message) -> None:
        world = self._world
        self._last = max(self._last, world.loop.now + world.delay(0.001))
        world.loop.call_at(self._last, self._deliver, message, context=self._receiver.context)
        if self._repeats and world.chance.random() < self._repeats:
            again = self._last + world.delay(0.2)
            world.loop.call_at(again, self._deliver, message, context=self._receiver.context)

    def cut(self, after_s: float) -> float:
        """Nothing arrives after this; when."""
        self._ends = min(self._ends, self._world.loop.now + after_s)
        return self._ends

    def _deliver(self, message: m.Message) -> None:
        if self._world.loop.now < self._ends:
            self._world.step("message", self._receiver.name, type(message).__name__)
            self._heard(message)


class AgentUplink:
    """The agent's way up, which is congested now and then."""

    def __init__(self, world: World, link: Link) -> None:
        self._world = world
        self._link = link

    def send(self, message: m.Message) -> None:
        self._link.send(message)

    @property
    def congested(self) -> bool:
        return self._world.chance.random() < 0.02

    async def drained(self) -> None:
        await self._world.pause(0.02)


class SimulatedNode:
    """A node of one driver: an agent, its workers, and the links to and from them."""

    def __init__(self, world: World, engine: SimulatedEngine, name: str, incarnation: int) -> None:
        self.world = world
        self.name = name
        self.incarnation = incarnation
        self.process = Process(f"{engine.process.name}/{name}.{incarnation}", engine.process.epoch)
        self.lost = False
        self.told_lost = False
        self.preempted = False
        self.up = Link(world, engine.process, lambda said: engine.heard(self, said), world.scenario.repeats)
        self.down = Link(world, self.process, self._told, 0.0)
        self.processes = PlayedProcesses(world, name, self.process)
        self.process.context.run(self._boot)

    def _boot(self) -> None:
        self.agent = Agent(
            AgentUplink(self.world, self.up),
            Path("/node"),
            self.processes,
            self.world.blocking(self.process),
            self.world.open_store,
        )

    def _told(self, message: m.Message) -> None:
        if isinstance(message, m.Upload):
            self.world.truth.uploading(self.process.epoch, message)
        self.agent.handle(message)  # type: ignore[arg-type]

    def die(self) -> None:
        """The agent and all of its workers are gone."""
        self.lost = True
        self.world.die(self.process)
        self.processes.vanish()


class SimulatedEngine(Engine):
    """The engine of one driver. See ``engine.base`` for what it keeps."""

    name = "simulated"

    def __init__(self, world: World, process: Process, attempt: Callable[[], int]) -> None:
        self.world = world
        self.process = process
        self._attempt = attempt
        self.nodes: dict[str, SimulatedNode] = {}
        self._listeners: list[Listener] = []
        self._incarnations = 0

    async def reserve(self, gang: Gang) -> tuple[Node, ...]:
        await self.world.pause(0.01)
        if self.world.refuses_place():
            self.world.charge(self._attempt(), CONTROLLER_LIMIT)
            raise EngineError("there is no room in this world")
        names = [f"node-{rank * self.world.scenario.nodes // gang.size}" for rank in range(gang.size)]
        for node in [self.nodes[name] for name in dict.fromkeys(names) if name in self.nodes]:
            if node.preempted and not node.told_lost:
                self._replace(node)
        while absent := [name for name in names if name not in self.nodes or self.nodes[name].told_lost]:
            await self.world.pause(0.05)
            self._incarnations += 1
            self.nodes[absent[0]] = SimulatedNode(self.world, self, absent[0], self._incarnations)
        return tuple(Node(name, self.nodes[name].incarnation, 4.0) for name in names)

    def send(self, node: str, message: m.ToAgent) -> None:
        if not self.nodes[node].lost:
            self.nodes[node].down.send(message)

    def attach(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def detach(self, listener: Listener) -> None:
        self._listeners.remove(listener)

    def pause(self, listener: Listener) -> None:
        """A link has no buffer that could fill."""

    def resume(self, listener: Listener) -> None:
        """See ``pause``."""

    async def close(self) -> None:
        for node in self.nodes.values():
            if not node.lost:
                node.die()

    def _replace(self, node: SimulatedNode) -> None:
        """End a node that was preempted."""
        node.up.cut(0.0)
        if not node.lost:
            node.die()
        node.told_lost = True
        for listener in tuple(self._listeners):
            listener.node_lost(node.name, "it was preempted")

    def heard(self, node: SimulatedNode, message: m.Message) -> None:
        if isinstance(message, m.Preempted):
            node.preempted = True
            self.world.charge(self._attempt(), MAX_PREEMPTIONS)
        for listener in tuple(self._listeners):
            listener.agent_said(node.name, message)  # type: ignore[arg-type]

    def lose(self, node: SimulatedNode) -> None:
        """A node goes, or only the way to it: then its agent goes on for a moment, and nobody hears it any more."""
        self.world.charge(self._attempt(), MAX_FAILURES)
        when = node.up.cut(self.world.delay(0.002))
        self.world.loop.call_at(when, self._tell_loss, node, context=self.process.context)
        if self.world.chance.random() < 0.6:
            node.die()
            return
        node.lost = True
        node.down.cut(0.0)
        self.world.loop.call_at(when + self.world.delay(0.05), node.die, context=self.world.outside)

    def _tell_loss(self, node: SimulatedNode) -> None:
        self.world.step("node lost", self.process.name, node.name)
        node.told_lost = True
        self.world.charge(self._attempt(), MAX_FAILURES)
        for listener in tuple(self._listeners):
            listener.node_lost(node.name, "its connection ended")
