"""Whether the holder of a run lives, and what a newcomer is told."""

from __future__ import annotations

import os
import secrets
import subprocess
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
import pytest

from holdfast.errors import FencedError, JournalError, RunIsLiveError
from holdfast.journal.epochs import holder_of, this_process
from holdfast.journal.log import Log
from holdfast.journal.open import open_log, read_records
from holdfast.storage.files import FileStore
from holdfast.storage.store import Store, open_store
from tests.journal.processes import driving
from tests.journal.stores import make_store


def never(seconds: float) -> None:
    raise AssertionError("nothing was to be waited for")


def held_by(store: Store, **changes: object) -> Log:
    """The run is held by somebody who is this process but for these changes."""
    log, _ = open_log(store, msgspec.structs.replace(this_process(lease_s=12.0), **changes))
    log.append(b"{}")
    log.sync()
    return log


def opens(store: Store, wait: Callable[[float], None] = never) -> bool:
    try:
        log, _ = open_log(store, this_process(), wait=wait)
    except RunIsLiveError:
        return False
    log.close()
    return True


def start_time(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def test_a_live_driver_is_named_with_what_to_do(store: Store, kind: str, quick: Path) -> None:
    with driving(kind, quick / "run") as driver:
        assert driver.ask("open") == "ok 1 0 0"
        with pytest.raises(RunIsLiveError) as caught:
            open_log(store, this_process(), wait=never)
        for part in (store.uri, f"process {driver.process.pid}", os.uname().nodename, "since 20", "take_over=True"):
            assert part in str(caught.value)
        assert driver.ask("append 1") == "ok 1"
        assert driver.ask("sync") == "ok 1"
        driver.kill()
        assert opens(store)


def test_a_stopped_driver_lives(kind: str, quick: Path, store: Store) -> None:
    with driving(kind, quick / "run") as driver:
        assert driver.ask("open") == "ok 1 0 0"
        driver.stop()
        assert not opens(store)


def test_a_process_reopens_its_own_run_only_after_closing_it(store: Store) -> None:
    first, _ = open_log(store, this_process())
    assert not opens(store)
    first.close()
    first.close()
    assert opens(store)
    with pytest.raises(JournalError, match="was closed"):
        first.sync()


def test_a_process_that_has_ended_does_not_live(store: Store) -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    held_by(store, pid=child.pid)
    assert opens(store)


def test_a_reused_pid_is_another_process(store: Store) -> None:
    log = held_by(store, start_time="1")
    assert opens(store)
    with pytest.raises(FencedError):
        log.sync()
    log.close()


def test_a_zombie_does_not_live(store: Store) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        log = held_by(store, pid=child.pid, start_time=start_time(child.pid))
        assert not opens(store)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert opens(store)
    log.close()


def test_a_holder_elsewhere_that_does_not_renew_for_one_lease_is_gone(store: Store) -> None:
    held_by(store, boot_id="another boot", host="elsewhere").renew()
    waits: list[float] = []
    assert opens(store, waits.append)
    assert sum(waits) == pytest.approx(12.0)


def test_a_holder_elsewhere_that_renews_lives(store: Store) -> None:
    log = held_by(store, boot_id="another boot", host="elsewhere")
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if sum(waits) >= 4.0:
            log.renew()

    with pytest.raises(RunIsLiveError, match="on host elsewhere"):
        open_log(store, this_process(), wait=wait)
    assert sum(waits) < 6.0
    log.close()
    assert opens(store)


def test_a_holder_elsewhere_that_closes_meanwhile_is_not_waited_for(store: Store) -> None:
    log = held_by(store, boot_id="another boot")
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        log.close()

    assert opens(store, wait)
    assert len(waits) == 1


def test_take_over_does_not_wait(store: Store) -> None:
    log = held_by(store, boot_id="another boot")
    newcomer, _ = open_log(store, this_process(), take_over=True, wait=never)
    for call in (log.sync, log.confirm, log.renew):
        with pytest.raises(FencedError, match="has taken over"):
            call()
    newcomer.close()


def test_a_driver_in_another_namespace_is_known_by_its_lock(quick: Path) -> None:
    held = FileStore(quick / "run")
    log = held_by(held, pid_namespace="pid:[1]")
    assert not opens(held)
    log._current.close()  # type: ignore[attr-defined]
    assert opens(held)
    log.close()


def test_a_driver_in_a_container_lives_until_it_is_killed(quick: Path) -> None:
    inside = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    if subprocess.run([*inside, "true"], capture_output=True).returncode != 0:
        pytest.skip("no right to make a process namespace here")
    store = FileStore(quick / "run")
    with driving("files", quick / "run", *inside) as driver:
        assert driver.ask("open") == "ok 1 0 0"
        found = holder_of(store)
        assert found is not None
        assert found[1].pid < 10
        assert not opens(store)
        driver.kill()
        # The lock falls when the container's last process is gone, which the parent does not wait for.
        while store.is_held("journal/000001-000000000000.log"):
            pass
        assert opens(store)


def test_in_another_namespace_where_no_lock_tells_the_lease_does(quick: Path) -> None:
    store = make_store("segments", quick / "run")
    held_by(store, pid_namespace="pid:[1]")
    waits: list[float] = []
    assert opens(store, waits.append)
    assert sum(waits) == pytest.approx(12.0)


def test_a_damaged_record_of_the_holder_needs_a_decision(store: Store) -> None:
    held_by(store).close()
    store.put("epochs/000001.json", b'{"host":')
    with pytest.raises(JournalError, match=r"000001\.json.*damaged.*take_over=True"):
        open_log(store, this_process())
    log, replay = open_log(store, this_process(), take_over=True)
    assert list(replay.records) == [b"{}"]
    log.close()


def test_of_many_newcomers_exactly_one_gets_the_run(store: Store) -> None:
    for turn in range(1, 11):
        held = held_by(store, start_time="1") if turn % 2 else None
        winners, losers = race(store, take_over=False)
        assert len(winners) == 1
        assert len(losers) == 5
        winners[0].append(b"{}")
        winners[0].sync()
        winners[0].close()
        if held is not None:
            held.close()
    assert sum(1 for _ in read_records(store)) == 15


def test_of_many_that_take_over_exactly_one_is_left(store: Store) -> None:
    for turn in range(1, 11):
        winners, _ = race(store, take_over=True)
        left = []
        for log in winners:
            log.append(b"{}")
            with suppress(FencedError):
                log.sync()
                left.append(log.epoch)
            log.close()
        assert left == [max(log.epoch for log in winners)]
        assert sum(1 for _ in read_records(store)) == turn


def test_take_over_is_said_about_the_holder_that_was_there(kind: str, quick: Path) -> None:
    """A newcomer that another one overtakes does not displace that one as well."""
    root = quick / "run"
    held = held_by(make_store(kind, root))
    overtaking: list[Log] = []

    class Overtaken(type(make_store(kind, root))):  # type: ignore[misc]
        def create(self, key: str, data: bytes) -> bool:
            if key == "epochs/000002.json":
                overtaking.append(open_log(make_store(kind, root), this_process(), take_over=True)[0])
            return bool(super().create(key, data))

    with pytest.raises(RunIsLiveError):
        open_log(Overtaken(root), this_process(), take_over=True)
    overtaking[0].confirm()
    overtaking[0].close()
    held.close()


def race(store: Store, *, take_over: bool) -> tuple[list[Log], list[BaseException]]:
    start = threading.Barrier(6)
    winners: list[Log] = []
    losers: list[BaseException] = []

    def newcomer() -> None:
        start.wait()
        try:
            winners.append(open_log(store, this_process(), take_over=take_over)[0])
        except (RunIsLiveError, FencedError) as error:
            losers.append(error)

    threads = [threading.Thread(target=newcomer) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return winners, losers


def test_of_racing_processes_exactly_one_gets_the_run(kind: str, quick: Path) -> None:
    store = make_store(kind, quick / "run")
    held_by(store, start_time="1")
    with ExitStack() as stack:
        drivers = [stack.enter_context(driving(kind, quick / "run")) for _ in range(3)]
        for driver in drivers:
            driver.send(f"race {quick}/go")
        assert [driver.answer() for driver in drivers] == ["waiting"] * 3
        (quick / "go").touch()
        answers = [driver.answer() for driver in drivers]
        assert sorted(answer.split()[0] for answer in answers) == ["RunIsLiveError", "RunIsLiveError", "ok"]


def test_the_same_run_on_memory() -> None:
    store = open_store(f"memory://{secrets.token_hex(8)}/run")
    log = held_by(store)
    assert not opens(store)
    newcomer, replay = open_log(store, this_process(), take_over=True)
    assert list(replay.records) == [b"{}"]
    with pytest.raises(FencedError):
        log.sync()
    newcomer.close()
    winners, losers = race(store, take_over=False)
    assert (len(winners), len(losers)) == (1, 5)
