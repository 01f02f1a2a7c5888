"""Contexts: each worker's record of a forward pass, for its backward passes.

A context's id consists of the number of the worker that made it, its *maker*, in the upper bits, and a counter. The id
is sent with calls. A worker that receives a new id makes its own Context with that id, which lasts until the maker
leaves the context or dies. The maker records which workers have the context, because it ends their Contexts when it
leaves. It adds the workers that it calls itself; a worker that gets the id from a third worker announces itself to the
maker. A call in a finished context may arrive late, and must not make a new Context. So for each maker, a worker
records the id of the oldest open context (all earlier ones are finished), and the ids of later ones that are finished.

Each worker's part of a context has a Lamport *clock*. Each departure of a tensor increments the clock, and the time is
sent with the tensor. The receiver sets its clock to that time, unless its clock is ahead. So if two tensors left a
worker at different times, the earlier one does not depend on anything that other workers computed from the later one.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ...errors import AbortedError, FastcollError, UsageError
from .edges import Origin, arrived, departed
from .passes import Pass

_SHIFT = 48  # the number of bits below the worker's number in an id


# sys.getrefcount of an object to which only one local variable refers; Python 3.14 borrows the argument from it.
_OWN_REFERENCES = 1 if sys.version_info >= (3, 14) else 2


def _is_exclusive(gradient: Any) -> bool:
    """Return whether nothing else in torch refers to a gradient or to its memory.

    torch makes the same test before it stores a gradient without a copy: the gradient must be no view, no broadcast,
    and no part of larger memory.
    """
    if gradient._use_count() > 1:
        return False
    if gradient.is_sparse:
        return bool(gradient._indices().is_contiguous() and gradient._values().is_contiguous())
    return bool(gradient.layout == torch.strided and gradient.untyped_storage().nbytes() == gradient.nbytes)


def maker(id: int) -> int:
    """Return the worker that made a context, a pass or a message."""
    return id >> _SHIFT


class Context:
    """This worker's part of a context."""

    def __init__(self, id: int) -> None:
        self.id = id
        self.workers: set[int] = set()  # on the maker: the other workers that have this context
        self.passes: dict[int, Pass] = {}
        self.error: FastcollError | None = None  # set when the context is over
        self._lock = threading.Lock()
        self._clock = 0
        self._tokens: dict[int, Any] = {}
        self._gradients: dict[Any, Any] = {}

    def admit(self, worker: int) -> bool:
        """Record that a worker has the context; return False if the context is over."""
        with self._lock:
            if self.error is None:
                self.workers.add(worker)
            return self.error is None

    def begin(self, part: Pass) -> Pass:
        """Add this worker's part of a pass; return `part`, or the part that was added before."""
        with self._lock:
            if self.error is not None:
                raise self.error
            return self.passes.setdefault(part.id, part)

    def depart(self, tensor: Any, message: int) -> int:
        """Record that a tensor leaves this worker in the message with this number; return the clock's time."""
        with self._lock:
            self._clock += 1
            self._tokens[message] = departed(tensor, message, self._clock)
            return self._clock

    def arrive(self, data: Any, origin: Origin, time: int) -> Any:
        """Return a tensor that arrived, as part of the local graph. `time`: the sender's time when the tensor left."""
        with self._lock:
            self._clock = max(self._clock, time)
        return arrived(data, origin)

    def tokens(self, messages: Iterable[int]) -> list[Any]:
        """Return the tokens (edges.py) of the tensors that left in these messages: roots of the local graph."""
        with self._lock:
            return [self._tokens[message] for message in messages]

    def accumulate(self, leaves: Sequence[Any], gradients: list[Any]) -> None:
        """Add `gradients` to the gradients of the leaves, and remove them from the list.

        A gradient that nothing else refers to is stored as it is; any other gradient is copied.
        """
        with self._lock:
            for leaf in reversed(leaves):
                gradient = gradients.pop()
                if gradient is None:
                    continue
                before = self._gradients.get(leaf)
                if before is not None:
                    gradient = before + gradient
                elif sys.getrefcount(gradient) > _OWN_REFERENCES or not _is_exclusive(gradient):
                    gradient = gradient.clone()
                self._gradients[leaf] = gradient

    def gradients(self) -> dict[Any, Any]:
        with self._lock:
            return dict(self._gradients)

    def end(self, error: FastcollError) -> None:
        """Fail the passes that are under way, and drop the record."""
        with self._lock:
            self.error = error
            passes = list(self.passes.values())
            self._tokens.clear()
        for each in passes:
            each.fail(error)


class Contexts:
    """All contexts in which this worker takes part."""

    def __init__(self, me: int) -> None:
        self._me = me
        self._lock = threading.Lock()
        self._contexts: dict[int, Context] = {}
        self._numbers = itertools.count(1)
        self._made = itertools.count(1)
        # For each maker: the id of its oldest open context, and the later ids of contexts that are over.
        self._finished: dict[int, tuple[int, set[int]]] = {}

    def new_id(self) -> int:
        """Return a new id of a message or a pass, unique among all workers."""
        return self._me << _SHIFT | next(self._numbers)

    def new(self) -> Context:
        with self._lock:
            context = Context(self._me << _SHIFT | next(self._made))
            self._contexts[context.id] = context
            return context

    def get(self, id: int) -> Context:
        """Return the context of an id.

        Raises:
            UsageError: there is none.
        """
        context = self._contexts.get(id)
        if context is None:
            raise UsageError(
                f"Could not find autograd context with id: {id!r:.50}; it was left, or is another worker's"
            )
        return context

    def join(self, id: int) -> tuple[Context | None, bool]:
        """Return the context whose id arrived with a call, or None if it is over; and whether it was made now."""
        with self._lock:
            context = self._contexts.get(id)
            oldest, finished = self._finished.get(maker(id), (0, ()))
            if context is not None or maker(id) == self._me or id < oldest or id in finished:
                return context, False
            context = self._contexts[id] = Context(id)
            return context, True

    def oldest(self) -> int:
        """Return the id of the oldest context that this worker made and that is not over."""
        with self._lock:
            own = [id for id in self._contexts if maker(id) == self._me]
            return min(own, default=self._me << _SHIFT)

    def end(self, id: int, oldest: int, error: FastcollError) -> Context | None:
        """End a context, and record that its maker's contexts before `oldest` are over; return the ended context."""
        with self._lock:
            context = self._contexts.pop(id, None)
            if maker(id) != self._me:
                before, finished = self._finished.get(maker(id), (0, set()))
                oldest = max(before, oldest)
                self._finished[maker(id)] = (oldest, {each for each in (*finished, id) if each >= oldest})
        if context is not None:
            context.end(error)
        return context

    def died(self, worker: int, error: FastcollError) -> None:
        """End the contexts that a dead worker has made, and fail the backward passes that it has begun."""
        with self._lock:
            of_worker = [id for id in self._contexts if maker(id) == worker]
            gone = [self._contexts.pop(id) for id in of_worker]
            self._finished[worker] = ((worker + 1) << _SHIFT, set())
            left = list(self._contexts.values())
        for context in gone:
            context.end(AbortedError(f"the maker of the autograd context is gone: {error}"))
        for context in left:
            for each in list(context.passes.values()):
                if maker(each.id) == worker:
                    each.fail(error)

    def __len__(self) -> int:
        return len(self._contexts)
