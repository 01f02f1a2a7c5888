"""Status: the description of a message that a receive or a probe returns."""

from __future__ import annotations


class Status:
    """Sender, tag and size of a message, filled by a receive or a probe; all fields are -1 before, as in MPI.

    A `Status` that is given to `recv` or `irecv` is filled when the receive is complete, unless it failed. Such a
    receive also takes a message that is shorter than its array.

    Attributes:
        source: the sender: a global rank; a rank in the group if a group's method was called.
        tag: the message's tag.
        count: its number of elements, in the sender's dtype. A probe sets it for numeric dtypes; for other dtypes,
            whose itemsize the header does not have, it is -1.
        nbytes: its number of bytes; -1 if a probe has found an array on a GPU that NCCL sends.
    """

    __slots__ = ("count", "nbytes", "source", "tag")

    def __init__(self) -> None:
        self.source = self.tag = self.count = self.nbytes = -1

    def fill(self, source: int, tag: int, count: int, nbytes: int) -> None:
        """Set all fields; called by the receive."""
        self.source, self.tag, self.count, self.nbytes = source, tag, count, nbytes

    def __repr__(self) -> str:
        fields = (f"{name}={getattr(self, name)}" for name in ("source", "tag", "count", "nbytes"))
        return f"Status({', '.join(fields)})"
