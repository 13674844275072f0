"""What may befall a world, each kind by its name. Every cause is written down, so that its effect can be judged."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.control.failures import CONTROLLER_LIMIT, MAX_FAILURES
from holdfast.engine.processes import WorkerExit
from holdfast.storage.store import MANIFEST
from holdfast.testing.simulation.audit import DAMAGE, STOP, STORAGE
from holdfast.testing.simulation.workers import Death, PlayedWorker
from holdfast.wire import messages as m

if TYPE_CHECKING:
    from holdfast.testing.simulation.cluster import SimulatedNode
    from holdfast.testing.simulation.driving import Driver
    from holdfast.testing.simulation.world import World


def cause(world: World, kind: str) -> None:
    """Make this fault happen now, where there is something that it can happen to."""
    _CAUSES[kind](world)


def doom_newborn(world: World, worker: PlayedWorker, kind: str) -> None:
    """A worker that was just started will not get as far as its function."""
    world.charge(worker.key[1], CONTROLLER_LIMIT)
    if kind == "killed":
        worker.home.ended(worker, WorkerExit(-9))
    else:
        worker.doom = Death(kind, world.chance.choice(("no module named foo", "no module named bar")))


def _workers(world: World) -> list[PlayedWorker]:
    return [
        worker
        for driver in world.living()
        for node in driver.engine.nodes.values()
        if not node.lost
        for worker in node.processes.workers.values()
        if worker.exit is None
    ]


def _kill_worker(world: World, how: WorkerExit) -> None:
    workers = _workers(world)
    if not workers:
        return
    worker = world.chance.choice(workers)
    world.charge(worker.key[1], MAX_FAILURES if worker.started or how.oom else CONTROLLER_LIMIT)
    _startle_peers(world, worker)
    worker.home.ended(worker, how)


def _startle_peers(world: World, worker: PlayedWorker) -> None:
    """Some of the others notice by a broken connection, perhaps before anybody else does."""
    for other in _workers(world):
        if other.key[:2] == worker.key[:2] and other is not worker and world.chance.random() < 0.3:
            other.doom = other.doom or Death("peer_loss")


def _doom_worker(world: World, death: Death) -> None:
    workers = [worker for worker in _workers(world) if worker.doom is None]
    if death.kind == "return":
        workers = [worker for worker in workers if _would_be_missed(world, worker)]
    if not workers:
        return
    worker = world.chance.choice(workers)
    world.charge(worker.key[1], MAX_FAILURES)
    worker.doom = death


def _hang_worker(world: World) -> None:
    if world.scenario.settings.hang_timeout_s is not None:
        _doom_worker(world, Death("hang"))


def _preempt_node(world: World) -> None:
    nodes = _live_nodes(world)
    if nodes:
        world.chance.choice(nodes)[1].up.send(m.Preempted())


def _preempt_driver(world: World) -> None:
    for driver in world.living():
        if driver.controller is not None:
            world.injected.whole.add(STOP)
            world.loop.call_soon(driver.preempt, context=driver.process.context)


def _would_be_missed(world: World, worker: PlayedWorker) -> bool:
    """Whether another rank is going to bring files to a step that this one does not reach any more."""
    plan = world.plan
    last = plan.steps - plan.steps % plan.period if plan.period else 0
    return any(rank != worker.rank for rank in plan.bringers) and 0 <= worker.step < last


def _live_nodes(world: World) -> list[tuple[Driver, SimulatedNode]]:
    return [
        (driver, node)
        for driver in world.living()
        for node in driver.engine.nodes.values()
        if not node.lost and node.process.alive
    ]


def _lose_zygote(world: World) -> None:
    nodes = _live_nodes(world)
    if not nodes:
        return
    _, node = world.chance.choice(nodes)
    for worker in list(node.processes.workers.values()):
        world.charge(worker.key[1], MAX_FAILURES)
        node.processes.ended(worker, WorkerExit(-9, lost=True))


def _lose_node(world: World) -> None:
    nodes = _live_nodes(world)
    if not nodes:
        return
    driver, node = world.chance.choice(nodes)
    for worker in node.processes.workers.values():
        _startle_peers(world, worker)
    driver.engine.lose(node)


def _refuse_place(world: World) -> None:
    world.no_room += 1


def _doom_newborn(world: World) -> None:
    world.dooms.append(world.chance.choice(("startup_raise", "startup_exit", "killed")))


def _kill_driver(world: World) -> None:
    living = world.living()
    if not living:
        return
    driver = world.chance.choice(living)
    world.die(driver.process)
    for node in driver.engine.nodes.values():
        if not node.lost:
            when = world.loop.now + world.delay(0.01)
            world.loop.call_at(when, node.die, context=world.outside)
    world.launch_later()


def _lose_power(world: World) -> None:
    world.lose_power()
    world.launch_later()


def _displace_driver(world: World) -> None:
    """SIGSTOP; somebody takes the run over; SIGCONT. Or the driver is displaced while it is at work."""
    living = world.living()
    if len(living) != 1 or living[0].log is None:
        return
    stopped = living[0]
    inside = stopped.process in world.calls_under_way()
    if world.chance.random() < 0.7:
        world.loop.freeze(stopped.process)
        world.loop.call_at(world.loop.now + world.delay(1.0), world.loop.thaw, stopped.process, context=world.outside)
    newcomer = world.launch(take_over=True)
    if inside:
        world.execute(newcomer.opening)


def _start_second(world: World) -> None:
    if len(world.living()) == 1:
        world.launch(take_over=False)


def _damage(world: World) -> None:
    """Spoil a committed checkpoint, and mostly give somebody a reason to read it."""
    history = world.truth.history()
    kept = sorted(set(history.committed) - history.retired - set(world.truth.damaged))
    if not kept:
        if world.plan.period and not world.plan.conflict:
            world.postpone("checkpoint damaged")
        return
    chance = world.chance
    index = kept[-1] if chance.random() < 0.7 else chance.choice(kept)
    directory = history.committed[index].directory
    keys = sorted(key for key in world.store.names() if key.startswith(directory + "/"))
    if not keys:
        return
    manifest = f"{directory}/{MANIFEST}"
    key = manifest if chance.random() < 0.3 else chance.choice(keys)
    data = world.store.visible(key) or b""
    place = chance.randrange(len(data)) if data else 0
    flipped = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :] if data else b"?"
    world.truth.damaged[index] = world.loop.now
    world.injected.whole.add(DAMAGE)
    world.store.spoil(key, chance.choice((flipped, None, data[:place])))
    world.note("damaged", key)
    if chance.random() < 0.7:
        cause(world, chance.choice(("worker killed", "driver killed", "node lost", "power lost")))


def _damage_snapshot(world: World) -> None:
    """A snapshot saves time, never truth: nothing may follow from its loss."""
    snapshots = sorted(key for key in world.store.names() if key.startswith("journal/snapshot-"))
    if snapshots:
        data = world.store.visible(snapshots[-1]) or b""
        world.store.spoil(snapshots[-1], world.chance.choice((None, data[: world.chance.randrange(len(data))])))


def _fail_calls(world: World) -> None:
    world.injected.whole.add(STORAGE)
    world.failing_below = world.chance.choice(("", "", "checkpoint_", "journal/"))
    world.failing_calls += world.chance.randint(1, 3)


def _fail_store(world: World, seconds: float) -> None:
    world.injected.whole.add(STORAGE)
    world.failing_below = world.chance.choice(("", "checkpoint_", "checkpoint_", "journal/"))
    world.failing_until = world.loop.now + seconds * world.chance.random()


def _slow_store(world: World) -> None:
    world.slow_until = world.loop.now + 3.0 * world.chance.random()


def _ask_to_stop(world: World) -> None:
    for driver in world.living():
        if driver.controller is not None:
            world.injected.whole.add(STOP)
            world.loop.call_soon(driver.stop, "asked to", context=driver.process.context)


_CAUSES: dict[str, Callable[[World], None]] = {
    "worker killed": lambda world: _kill_worker(world, WorkerExit(-9)),
    "worker out of memory": lambda world: _kill_worker(world, WorkerExit(-9, oom=True)),
    "worker crashed": lambda world: _kill_worker(world, WorkerExit(-11)),
    "worker exits": lambda world: _doom_worker(world, Death("exit")),
    "worker raises": lambda world: _doom_worker(world, Death("raise")),
    "worker returns early": lambda world: _doom_worker(world, Death("return")),
    "worker hangs": _hang_worker,
    "worker dies at start": _doom_newborn,
    "zygote lost": _lose_zygote,
    "node lost": _lose_node,
    "node preempted": _preempt_node,
    "no room": _refuse_place,
    "driver killed": _kill_driver,
    "power lost": _lose_power,
    "driver displaced": _displace_driver,
    "second driver": _start_second,
    "checkpoint damaged": _damage,
    "snapshot damaged": _damage_snapshot,
    "call fails": _fail_calls,
    "store fails": lambda world: _fail_store(world, 1.0),
    "store fails for long": lambda world: _fail_store(world, 15.0),
    "store is slow": _slow_store,
    "asked to stop": _ask_to_stop,
    "driver preempted": _preempt_driver,
}
