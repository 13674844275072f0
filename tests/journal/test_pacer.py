"""Snapshots take at most their share of the time."""

from __future__ import annotations

from holdfast.journal.pacer import SnapshotPacer


def test_at_most_the_share_of_the_time_goes_into_snapshots() -> None:
    pacer = SnapshotPacer(share=0.05, minimum=10)
    now = busy = 0.0
    for position in range(1, 10_000):
        now += 0.01
        if pacer.due(now, position):
            now += 0.3
            busy += 0.3
            pacer.took(now, 0.3, position)
    assert busy / now > 0.04
    assert (busy - 0.3) / now <= 0.05


def test_nothing_new_means_no_snapshot() -> None:
    pacer = SnapshotPacer(minimum=10)
    assert not pacer.due(1e9, 9)
    assert pacer.due(1e9, 10)
    pacer.took(1e9, 0.0, 10)
    assert not pacer.due(2e9, 19)
    assert pacer.due(2e9, 20)
