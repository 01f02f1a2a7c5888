"""Ledger: one worker's part of the protocol that counts references to remote values. It uses no sockets or threads.

A *reference* stands for one RRef object on one worker. It consists of the *owner*, which is the worker that has the
value; the id of the value, which all references to the value share; and an id of its own (torch's fork id). The
*holder* of a reference is the worker on which its RRef object is. A reference is *known* once the owner counts it. The
owner frees a value when it no longer counts any reference to it. Messages may arrive in any order, even between two
workers.

| message | from, to | meaning |
|---|---|---|
| FORK | holder, owner | I hold a reference that a worker other than you passed on to me |
| CONFIRMED | owner, holder | that reference is known |
| ACCEPTED | holder, the worker that passed the reference on | the reference that you passed on to me is known |
| DELETE | holder, owner | the object of this reference was destroyed |
| SWEEP | owner, all | these workers died; answer once all references that you got from them or gave them are known |
| SWEPT | all, owner | those references are known, and I accept no more references from the dead workers |

1. The *children* of a reference are the references that its holder passed on from it. A holder sends DELETE for a
   reference only when that reference and all its children are known. So every unknown reference has a known ancestor
   (parent, parent's parent, and so on), and the owner keeps the value. A reference that the owner itself passes on is
   known at once.
2. When a worker dies, the owner still counts the dead worker's references, because a living worker may hold an unknown
   reference that the dead worker passed on. The owner sends a SWEEP that names all dead workers. When all living
   workers have answered, no worker holds such a reference, and the owner deletes the references of the dead workers.
   A worker that gave a reference to a worker that died sends FORK in the dead worker's name, because the dead worker
   may have passed that reference on. Another death restarts the sweep: the newly dead worker may have passed on
   references that it got from the other dead workers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

FORK, CONFIRMED, ACCEPTED, DELETE, SWEEP, SWEPT = range(6)

Id = tuple[int, int]  # the worker that made the id, and a number


class Reference(NamedTuple):
    """The reference `fork` to the value `rref` of the worker `owner`."""

    owner: int
    rref: Id
    fork: Id


class CountingMessage(NamedTuple):
    """A message of the protocol: see the table at the top."""

    kind: int
    ref: Reference | None = None
    number: int = 0  # FORK: the holder; SWEEP, SWEPT: the number of the sweep
    dead: tuple[int, ...] = ()


@dataclass
class Held:
    """A reference of this worker to a value of another worker."""

    ref: Reference
    parent: int  # the worker that passed it on; this worker, if `remote` made the value
    known: bool
    children: int = 0  # how many references were passed on from this one and may be unknown
    released: bool = False  # the RRef object was destroyed


@dataclass
class Child:
    """A reference that this worker passed on, and that may be unknown."""

    ref: Reference
    parent: Id  # `fork` of the reference from which it was passed on
    to: int


@dataclass
class Ledger:
    """One worker's references.

    After each call of a method, the caller sends the messages in `outbox`, and drops the values in `freed`.
    """

    me: int
    others: set[int]  # the other living workers
    # For each value of this worker: the holder of each known reference.
    forks: dict[Id, dict[Id, int]] = field(default_factory=dict)
    held: dict[Id, Held] = field(default_factory=dict)  # by `fork`
    children: dict[Id, Child] = field(default_factory=dict)  # by `fork`
    dead: set[int] = field(default_factory=set)
    sweep: int = 0  # number of this worker's last sweep
    awaited: set[int] = field(default_factory=set)  # the workers that have not answered that sweep
    # For each owner: the number of the sweep that this worker must answer.
    unanswered: dict[int, int] = field(default_factory=dict)
    ids: int = 0  # how many ids this worker has made
    outbox: list[tuple[int, CountingMessage]] = field(default_factory=list)
    freed: list[Id] = field(default_factory=list)

    # ---- RRef objects of this worker ---------------------------------------------------------------------------------

    def make(self, owner: int) -> Reference:
        """Return the first reference to a new value.

        If another worker owns the value, this worker sends no FORK: the call of `remote` takes its place.
        """
        ref = Reference(owner, self._new_id(), self._new_id())
        if owner == self.me:
            self.forks[ref.rref] = {ref.fork: owner}
        elif owner not in self.dead:
            self.held[ref.fork] = Held(ref, self.me, known=False)
        return ref

    def pass_on(self, ref: Reference, to: int) -> Reference:
        """Return a child of a reference, to be sent to worker `to`."""
        child = Reference(ref.owner, ref.rref, self._new_id())
        # If one of these workers is dead, record nothing: the child does not arrive, or the owner is gone.
        if not {to, ref.owner} & self.dead:
            if ref.owner == self.me:
                self.forks[ref.rref][child.fork] = to
            else:
                self.children[child.fork] = Child(child, ref.fork, to)
                self.held[ref.fork].children += 1
        return child

    def take_back(self, ref: Reference) -> None:
        """Undo `pass_on` or `make` for a reference whose message was not sent."""
        if ref.owner == self.me:
            self._delete(ref)
        elif ref.fork in self.children:
            self._accepted(ref)
        else:
            self.held.pop(ref.fork, None)

    def take_in(self, ref: Reference, parent: int) -> bool:
        """Add a reference that arrived from `parent`; if `parent` has died, ignore the reference and return False."""
        if parent in self.dead:
            return False
        if ref.owner == self.me:
            self.forks.setdefault(ref.rref, {})[ref.fork] = self.me
            if parent != self.me:
                self._send(parent, ACCEPTED, ref)
        elif ref.owner not in self.dead:
            self.held[ref.fork] = Held(ref, parent, known=parent == ref.owner)
            if parent != ref.owner:
                self._send(ref.owner, FORK, ref, self.me)
        return True

    def release(self, ref: Reference) -> None:
        """Record that the RRef object of a reference was destroyed."""
        if ref.owner == self.me:
            self._delete(ref)
        elif held := self.held.get(ref.fork):
            held.released = True
            self._settle(held)

    def release_all(self) -> None:
        """Release all references of this worker."""
        for rref, forks in self.forks.copy().items():
            for fork in [fork for fork, holder in forks.items() if holder == self.me]:
                self.release(Reference(self.me, rref, fork))
        for held in list(self.held.values()):
            self.release(held.ref)

    def is_settled(self) -> bool:
        """Return whether no references are left that concern this worker.

        This is so if no worker holds a reference to a value of this worker, this worker holds no references, and all
        references that it passed on are known.
        """
        return not (self.forks or self.held or self.children)

    # ---- messages --------------------------------------------------------------------------------------------------

    def handle(self, sender: int, message: CountingMessage) -> None:
        """Handle a message of the protocol."""
        if sender in self.dead:
            return
        kind, ref, number, dead = message
        if kind == SWEEP:
            # The message of an older sweep may arrive after the message of a newer sweep.
            self.unanswered[sender] = max(number, self.unanswered.get(sender, 0))
            for worker in dead:
                self.died(worker)
        elif kind == SWEPT:
            self._swept(sender, number)
        else:
            assert ref is not None
            if kind == FORK:
                self._fork(sender, ref, number)
            elif kind == DELETE:
                self._delete(ref)
            elif kind == CONFIRMED:
                self._confirmed(ref)
            elif kind == ACCEPTED:
                self._accepted(ref)
        self._answer()

    def died(self, worker: int) -> None:
        """Record that another worker has ended; its messages are ignored from now on."""
        if worker in self.dead or worker == self.me:
            return
        self.dead.add(worker)
        self.others.discard(worker)
        self.unanswered.pop(worker, None)
        self.held = {fork: held for fork, held in self.held.items() if held.ref.owner != worker}
        self.children = {fork: child for fork, child in self.children.items() if child.ref.owner != worker}
        for child in self.children.values():
            if child.to == worker:
                self._send(child.ref.owner, FORK, child.ref, worker)
        if self.awaited or self._of_the_dead():
            self._begin_sweep()

    def _fork(self, sender: int, ref: Reference, holder: int) -> None:
        self.forks.setdefault(ref.rref, {})[ref.fork] = holder
        self._send(sender, CONFIRMED, ref)
        if holder != sender:
            self.died(holder)  # `sender` has noticed it; this worker may have no link to the dead worker
        if holder in self.dead and not self.awaited:
            self._begin_sweep()

    def _delete(self, ref: Reference) -> None:
        forks = self.forks.get(ref.rref, {})
        if forks.pop(ref.fork, None) is not None and not forks:
            del self.forks[ref.rref]
            self.freed.append(ref.rref)

    def _confirmed(self, ref: Reference) -> None:
        held = self.held.get(ref.fork)
        if held is None:  # this worker sent the FORK in the name of a dead worker
            self._accepted(ref)
            return
        held.known = True
        if held.parent == self.me:
            self._accepted(ref)
        elif held.parent not in self.dead:
            self._send(held.parent, ACCEPTED, ref)
        self._settle(held)

    def _accepted(self, ref: Reference) -> None:
        if child := self.children.pop(ref.fork, None):
            parent = self.held[child.parent]
            parent.children -= 1
            self._settle(parent)

    def _settle(self, held: Held) -> None:
        """Send DELETE for a destroyed reference as soon as rule 1 allows it."""
        if held.released and held.known and not held.children:
            del self.held[held.ref.fork]
            self._send(held.ref.owner, DELETE, held.ref)

    # ---- the dead ------------------------------------------------------------------------------------------------

    def _of_the_dead(self) -> list[Reference]:
        """Return the references to own values whose holders have died."""
        return [
            Reference(self.me, rref, fork)
            for rref, forks in self.forks.items()
            for fork, holder in forks.items()
            if holder in self.dead
        ]

    def _begin_sweep(self) -> None:
        self.sweep += 1
        self.awaited = set(self.others)
        for worker in self.others:
            self._send(worker, SWEEP, None, self.sweep, tuple(sorted(self.dead)))
        if not self.awaited:
            self._end_sweep()

    def _answer(self) -> None:
        """Answer the sweeps that no unknown reference delays.

        The answer to an owner is delayed as long as there is an unknown reference to one of the owner's values that
        this worker got from a dead worker or gave to a dead worker. Until another worker dies, there can be no new
        reference of this kind, because `take_in` refuses references from dead workers.
        """
        if self.unanswered:
            unknown = {h.ref.owner for h in self.held.values() if not h.known and h.parent in self.dead}
            unknown |= {child.ref.owner for child in self.children.values() if child.to in self.dead}
            for owner in self.unanswered.keys() - unknown:
                self._send(owner, SWEPT, None, self.unanswered.pop(owner))

    def _swept(self, sender: int, number: int) -> None:
        if number == self.sweep and sender in self.awaited:
            self.awaited.remove(sender)
            if not self.awaited:
                self._end_sweep()

    def _end_sweep(self) -> None:
        for ref in self._of_the_dead():
            self._delete(ref)

    def _new_id(self) -> Id:
        self.ids += 1
        return self.me, self.ids

    def _send(
        self, to: int, kind: int, ref: Reference | None, number: int = 0, dead: tuple[int, ...] = ()
    ) -> None:
        self.outbox.append((to, CountingMessage(kind, ref, number, dead)))
