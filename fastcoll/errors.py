"""Every exception that fastcoll raises on purpose, as one tree.

    FastcollError(RuntimeError)
    ├── UsageError(ValueError)            the call was wrong; nothing moved, the group stays usable
    │   ├── ArrayError(TypeError)         an array or dtype that cannot be used as it is
    │   ├── MismatchError                 the ranks' calls do not match
    │   ├── NotInitializedError           no process group, or one that was destroyed
    │   └── UnavailableError              a backend or extra that is not there, with the cure
    ├── RendezvousError                   the ranks could not find one another
    │   └── StoreError                    a store refused, or lost its server
    │       └── StoreTimeoutError(TimeoutError)
    ├── ResourceError(OSError)            the machine cannot give what is needed (shared memory, ports)
    └── GroupError                        the group has failed and stays so
        ├── PeerDiedError                 a rank's process ended
        ├── CollectiveTimeoutError(TimeoutError)  a rank did not come in time
        └── AbortedError                  the group was aborted or destroyed under the call

Misuse and failure are different branches: after a UsageError the program may go on.
"""

from __future__ import annotations

from collections.abc import Sequence


class FastcollError(RuntimeError):
    """Base of all errors of this library."""


class UsageError(FastcollError, ValueError):
    """The call was wrong; no data moved and the group stays usable."""


class ArrayError(UsageError, TypeError):
    """An array that cannot take part as it is: kind, dtype, layout or permission."""


class MismatchError(UsageError):
    """The ranks' calls do not match; raised on every rank before data moves."""


class NotInitializedError(UsageError):
    """There is no process group, or this one was destroyed."""


class UnavailableError(UsageError):
    """A backend, extra or feature that is not available here; the message has the cure."""


class RendezvousError(FastcollError):
    """The ranks could not find one another."""


class StoreError(RendezvousError):
    """A store refused an operation, or its server is gone."""


class StoreTimeoutError(StoreError, TimeoutError):
    """A key was not set in time."""


class ResourceError(FastcollError, OSError):
    """The machine cannot give what is needed."""


class GroupError(FastcollError):
    """The group has failed; every later call on it raises the same cause.

    Attributes:
        ranks: global ranks at fault, as far as they are known.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class PeerDiedError(GroupError):
    """The process of a rank ended while the group needed it."""


class CollectiveTimeoutError(GroupError, TimeoutError):
    """A rank did not arrive within the timeout."""


class AbortedError(GroupError):
    """The group was aborted, interrupted or destroyed while the call was under way."""
