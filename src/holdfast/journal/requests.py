"""What other processes ask of a run's driver: ``requests/stop-000003.json`` asks the driver of epoch 3 to stop.

A request names the epoch that it is meant for, so one that comes too late never stops the next driver. It is created if
absent: asking twice is asking once. This module must never decide what comes of a request.
"""

from __future__ import annotations

import msgspec

from holdfast.storage.store import Store


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks."""

    at: float
    host: str
    pid: int


def stop_key(epoch: int) -> str:
    return f"requests/stop-{epoch:06d}.json"


def ask_to_stop(store: Store, epoch: int, request: Request) -> bool:
    """Ask the driver of ``epoch`` to stop; False when it was asked before and has not answered yet."""
    return store.create(stop_key(epoch), msgspec.json.encode(request))


def asked_to_stop(store: Store, epoch: int) -> bool:
    """Whether the driver of ``epoch`` was asked to stop. The request is taken away."""
    if not store.exists(stop_key(epoch)):
        return False
    store.delete(stop_key(epoch))
    return True


def forget_requests(store: Store, epoch: int) -> None:
    """Take away what drivers before ``epoch`` were asked."""
    for key in store.keys("requests"):
        if key.startswith("requests/stop-") and key < stop_key(epoch):
            store.delete(key)
