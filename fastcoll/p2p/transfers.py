"""One posted send or receive: the Work that its caller holds, and what the courier needs to carry it out."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..core import signature
from ..core.monitor import Vigil, Wait
from ..core.operands import OBJECTS_TAG
from ..core.work import Work
from ..errors import MismatchError
from ..kernels.primitives import address_of

if TYPE_CHECKING:
    from ..interop.arrays import Adopted

Array = NDArray[Any]

DTYPE_BITS = 22

LETTER = np.dtype([("fastcoll: what is said of an array on a GPU", np.uint8, (192,))])
"""Of messages that announce an array on a GPU, which travels otherwise (gpu/nccl_mail.py). Users have no such dtype."""


@lru_cache(maxsize=1024)
def _dtype_code(dtype: np.dtype[Any]) -> int:
    return signature.dtype_code(dtype)


def kind_of(tag: int, dtype: np.dtype[Any]) -> int:
    """The word of a frame that must be equal on both sides: tag and dtype."""
    return tag << DTYPE_BITS | _dtype_code(dtype)


def tag_of(kind: int) -> int:
    """The tag in a kind."""
    return kind >> DTYPE_BITS


def contents(kind: int, nbytes: int) -> str:
    """What a message or an array holds, for people: `(float32, 10 elements)`."""
    if _is_on_gpu(kind):
        return "an array on a GPU"
    if tag_of(kind) == OBJECTS_TAG:  # only their sizes can differ from what is expected
        return f"{nbytes // 8} objects"
    return signature.describe((kind & 0xFF) << 8, nbytes).removeprefix("none")


def _is_on_gpu(kind: int) -> bool:
    return kind & (1 << DTYPE_BITS) - 1 == _dtype_code(LETTER)


def _dropped(kind: int, other: int) -> str:
    """What ends the error about a message and an array of these kinds."""
    if _is_on_gpu(kind) != _is_on_gpu(other):
        cure = "both must be on GPUs, or both in host memory"
    elif tag_of(kind) == OBJECTS_TAG:
        cure = "both lists must have the same length"
    else:
        cure = "both must have the same dtype and number of elements"
    return f"{cure}. The message was dropped, the group stays usable"


Held = tuple[int, int]
"""Kind and bytes of a message or an array."""


def refused(doing: str, sender: str, message: Held, receiver: str, array: Held) -> MismatchError:
    """For the sender of a message that the receiver's array cannot hold."""
    return MismatchError(
        f"{doing}: the message from {sender} holds {contents(*message)}, but the array of the matching receive on "
        f"{receiver} holds {contents(*array)}; {_dropped(message[0], array[0])}"
    )


def unfit(doing: str, receiver: str, array: Held, sender: str, message: Held) -> MismatchError:
    """For the receiver of such a message."""
    return MismatchError(
        f"{doing}: the array on {receiver} holds {contents(*array)}, but the message from {sender} holds "
        f"{contents(*message)}; {_dropped(message[0], array[0])}"
    )


class Transfer(Work):
    """A send or a receive under way. Equal only to itself.

    Attributes:
        peer: the other group rank; None for a receive from any.
        kind, nbytes, address: of the caller's array, which `array` keeps alive.
        watch: its deadline and the peers it needs.
    """

    def __init__(
        self, name: str, array: Array, peer: int | None, tag: int, vigil: Vigil, timeout: float, rank: int
    ) -> None:
        self.peer = peer
        self.kind = kind_of(tag, array.dtype)
        self.nbytes = array.nbytes
        self.array = array
        self.address = address_of(array)
        what = f"{name}, objects" if tag == OBJECTS_TAG else f"{name}, tag {tag}"
        # A message to a rank that is leaving may still be taken there. What comes in vain while this one is leaving,
        # leaving.py sees, and ends without failing the group.
        taker = peer if peer is not None and isinstance(self, Send) else rank
        self.watch = Wait(vigil, what, _needed(vigil, peer, rank, taker), timeout)
        self._vigil = vigil
        self._rank = rank
        super().__init__(what)

    @property
    def tag(self) -> int:
        """The message's tag."""
        return tag_of(self.kind)

    @property
    def name(self) -> str:
        """What it is, for messages."""
        return self._describe

    def fits(self, kind: int, nbytes: int) -> bool:
        """Whether the other side has the same dtype and size."""
        return self.kind == kind and self.nbytes == nbytes

    def finish_array(self) -> None:
        """Write a packed copy back to the caller's array; nothing to do for a send."""


class Send(Transfer):
    """A message to `peer`; `buffered`: complete as soon as it is posted, the array is a copy."""

    def __init__(
        self,
        array: Array,
        peer: int,
        tag: int,
        vigil: Vigil,
        timeout: float,
        rank: int,
        buffered: bool = False,
    ) -> None:
        super().__init__(f"send to {vigil.name(peer)}", array, peer, tag, vigil, timeout, rank)
        self.peer: int = peer
        self.buffered = buffered
        self.needs_message = peer == rank  # whose receive may never be posted

    def misfit(self, kind: int, nbytes: int) -> MismatchError:
        """The receiver asked for something else."""
        here, there = self._vigil.name(self._rank), self._vigil.name(self.peer)
        return refused(self.name, here, (self.kind, self.nbytes), there, (kind, nbytes))


class Receive(Transfer):
    """A message wanted from `peer`, or from any rank."""

    needs_message = True

    def __init__(
        self, adopted: Adopted, peer: int | None, tag: int, vigil: Vigil, timeout: float, rank: int
    ) -> None:
        source = "any rank" if peer is None else vigil.name(peer)
        super().__init__(f"recv from {source}", adopted.array, peer, tag, vigil, timeout, rank)
        self._adopted = adopted

    def misfit(self, source: int, kind: int, nbytes: int) -> MismatchError:
        """The message is something else."""
        here, there = self._vigil.name(self._rank), self._vigil.name(source)
        return unfit(self.name, here, (self.kind, self.nbytes), there, (kind, nbytes))

    def finish_array(self) -> None:
        self._adopted.finish()


def _needed(vigil: Vigil, peer: int | None, rank: int, taker: int) -> Callable[[], list[int]]:
    """The ranks that a transfer waits for, as Wait asks for them; none while `taker` is leaving."""
    others = [other for other in range(len(vigil.members)) if other != rank] or [rank]

    def needed() -> list[int]:
        if vigil.is_leaving(taker):
            return []
        if peer is not None:
            return [peer]
        # Hopeless only when all have left; the own rank could still send from another thread, but a
        # rank that waits for nobody else is taken for stuck.
        return [other for other in others if not vigil.has_left(other)] or others

    return needed
