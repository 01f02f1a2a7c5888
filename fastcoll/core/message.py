"""Status: the description of a message that a receive or a probe returns."""

from __future__ import annotations


class Status:
    """Sender, tag and size of a message. All fields are -1 until a receive or a probe fills them.

    A receive fills its `Status` when it is complete; a receive that fails does not. A receive with a `Status` also
    accepts a message that is shorter than its array.

    Attributes:
        source: the sender's global rank, or its rank in the group if a method of a group was called.
        tag: the message's tag.
        count: the message's number of elements, in the sender's dtype. After a probe it is -1 if the dtype is not
            numeric, because the message's header does not have the itemsize of such a dtype.
        nbytes: the message's number of bytes. After a probe it is -1 if NCCL sends the message from a GPU.
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
