"""The contract of an engine: nodes with an agent each, and messages to and from them.

What every engine promises, and ``holdfast.testing.contracts`` proves:

- ``reserve`` gives a gang its nodes, all or nothing, or raises EngineError within its time-out, saying what is asked,
  what there is and what is missing. The answer names one node for each rank; ranks on one node are neighbours.
- Messages between the controller and one agent arrive in order, once, and only from peers that know the job's secret.
  What cannot be sent is dropped, and the node is then told as lost.
- The loss of a node is told once, by ``node_lost``, as soon as its connection ends; after that nothing arrives from it.
  An engine that can replace a node does so on the next ``reserve``.
- A node that is about to be taken away says so, by ``Preempted``, as long as its agent can. It goes on until then; the
  next ``reserve`` gives no rank of a new gang to it.
- Between a listener's ``pause`` and its ``resume`` or ``detach``, next to nothing arrives from any node: the agents are
  held back, and hold their workers back. What happens meanwhile is told afterwards.
- Listeners are called on the engine's event loop, never at the same time.
- ``close``, and the death of the driver in any way, ends every agent and whatever it had started.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import msgspec

from holdfast.wire.messages import FromAgent, ToAgent


class Gang(msgspec.Struct, frozen=True):
    """What a group asks for."""

    size: int
    cpus: float = 1.0
    gpus: float = 0.0
    timeout_s: float = 60.0


class Node(msgspec.Struct, frozen=True):
    """A place with an agent. ``incarnation`` grows each time the node gets a new agent."""

    name: str
    incarnation: int
    cpus: float
    gpus: float = 0.0


class Listener(Protocol):
    """Who hears of an engine's messages and losses."""

    def agent_said(self, node: str, message: FromAgent) -> None: ...

    def node_lost(self, node: str, reason: str) -> None: ...


class Engine(ABC):
    """See the module's docstring."""

    name: str

    def check(self, gang: Gang) -> None:
        """EngineError when this gang can never be had here, said before anything starts. Where nodes come and go, any
        gang may be had one day."""
        return

    @abstractmethod
    async def reserve(self, gang: Gang) -> tuple[Node, ...]:
        """The node of each rank."""

    @abstractmethod
    def send(self, node: str, message: ToAgent) -> None: ...

    @abstractmethod
    def attach(self, listener: Listener) -> None: ...

    @abstractmethod
    def detach(self, listener: Listener) -> None: ...

    @abstractmethod
    def pause(self, listener: Listener) -> None: ...

    @abstractmethod
    def resume(self, listener: Listener) -> None: ...

    def notice(self, gang: Gang) -> str:
        """What a person should know about this gang here, before it starts; or nothing."""
        return ""

    @abstractmethod
    async def close(self) -> None: ...
