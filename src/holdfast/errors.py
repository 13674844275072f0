"""Every exception that Holdfast raises on purpose, in one tree.

::

    HoldfastError
    ├── ConfigurationError (also ValueError)   an option, name or path that cannot be used
    ├── PicklingError (also TypeError)         a function or value that cannot travel to a worker
    ├── MetricsError (also TypeError)          metrics that JSON cannot hold
    ├── NotInWorkerError (also RuntimeError)   a worker's call made outside a worker
    ├── CollectiveError (also RuntimeError)    a barrier or broadcast that not every rank came to
    ├── ReportError (also RuntimeError)        a report whose checkpoint cannot be committed
    ├── NoCheckpointError (also RuntimeError)  a result has no checkpoint, or none with the metric that was asked for
    ├── WireError                              a message or handshake that is not ours
    ├── StorageError                           the store refused, after its own retries
    │   ├── MissingError (also KeyError)       nothing lies under that key
    │   └── DamagedError                       what lies there is not what was written
    ├── JournalError                           the journal cannot be read or written
    │   ├── FencedError                        another driver has taken the run over
    │   └── RunIsLiveError                     another driver holds the run
    ├── EngineError                            agents or resources could not be had
    └── TrainingFailedError (also RuntimeError)  what ``fit`` raises when a run gives up
        ├── WorkerGroupError                   the workers failed; ``worker_failures`` holds each rank's error
        ├── ControllerError                    the driver's side failed
        └── PreemptionError                    the driver was preempted, or nodes more often than allowed

Errors are picklable and carry plain values alone.
"""

from __future__ import annotations

from collections.abc import Mapping


class HoldfastError(Exception):
    """The root of the tree."""


class ConfigurationError(HoldfastError, ValueError):
    """An option, name or path that cannot be used; the message says which, why and what to do."""


class PicklingError(HoldfastError, TypeError):
    """A function or value that cannot travel to a worker; the message names the object."""


class MetricsError(HoldfastError, TypeError):
    """Metrics that JSON cannot hold; the message names the key and the conversion."""


class NotInWorkerError(HoldfastError, RuntimeError):
    """A call that belongs inside a training function was made elsewhere."""


class CollectiveError(HoldfastError, RuntimeError):
    """A barrier or broadcast that not every rank came to; the message names the missing ones."""


class ReportError(HoldfastError, RuntimeError):
    """A report's checkpoint cannot be committed; the message says why."""


class NoCheckpointError(HoldfastError, RuntimeError):
    """A result has no checkpoint, or none with the metric that was asked for."""


class WireError(HoldfastError):
    """A message or handshake that is not ours."""


class StorageError(HoldfastError):
    """The store refused a call after its own retries."""


class MissingError(StorageError, KeyError):
    """Nothing lies under that key."""

    def __str__(self) -> str:
        return Exception.__str__(self)


class DamagedError(StorageError):
    """What lies in storage is not what was written."""


class JournalError(HoldfastError):
    """The journal cannot be read or written."""


class FencedError(JournalError):
    """Another driver has taken the run over; this one must not act any more."""


class RunIsLiveError(JournalError):
    """Another driver holds the run."""


class EngineError(HoldfastError):
    """Agents or resources could not be had."""


class TrainingFailedError(HoldfastError, RuntimeError):
    """A run has given up."""


class WorkerGroupError(TrainingFailedError):
    """The workers failed. ``worker_failures`` maps each failed rank to its error."""

    def __init__(self, message: str, worker_failures: Mapping[int, BaseException]) -> None:
        super().__init__(message)
        self.worker_failures: dict[int, BaseException] = dict(worker_failures)

    def __reduce__(self) -> tuple[type[WorkerGroupError], tuple[str, dict[int, BaseException]]]:
        return (type(self), (self.args[0], self.worker_failures))


class ControllerError(TrainingFailedError):
    """The driver's side of a run failed."""


class PreemptionError(TrainingFailedError):
    """The driver was preempted, so that the run has stopped and can be resumed; or nodes were preempted more often than
    ``max_preemption_failures`` allows."""
