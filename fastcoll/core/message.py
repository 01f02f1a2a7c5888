"""What a receive or a probe says of a message."""

from __future__ import annotations


class Status:
    """What a message is, as a receive or a probe has found it; as in MPI, and all fields are -1 before.

    A `Status` that is given to `recv` or `irecv` is filled when the receive is complete, unless that failed. Such a
    receive takes a message that is shorter than its array, too.

    Attributes:
        source: who has sent the message: a global rank; a rank in the group, where a group's method was called.
        tag: the message's.
        count: its elements, in the sender's dtype; -1 where a probe cannot know how large these are, which it knows of
            numbers.
        nbytes: its bytes; -1 where a probe has found an array on a GPU that goes by NCCL.
    """

    __slots__ = ("count", "nbytes", "source", "tag")

    def __init__(self) -> None:
        self.source = self.tag = self.count = self.nbytes = -1

    def fill(self, source: int, tag: int, count: int, nbytes: int) -> None:
        """Say what the message is; for who has received it."""
        self.source, self.tag, self.count, self.nbytes = source, tag, count, nbytes

    def __repr__(self) -> str:
        fields = (f"{name}={getattr(self, name)}" for name in ("source", "tag", "count", "nbytes"))
        return f"Status({', '.join(fields)})"
