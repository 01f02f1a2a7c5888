"""Who holds a remote value: one worker's part of the protocol that counts references; no sockets, threads or locks.

A *reference* stands for one RRef object of one worker. It has the id of the value, which all references to it share, an
id of its own (torch calls it the fork id), and names the value's owner. The owner frees a value when it knows of no
reference to it. Messages need no order, not even between the same two workers.

| message | from, to | says |
|---|---|---|
| FORK | holder, owner | I hold a reference that another worker than you passed on to me |
| CONFIRMED | owner, holder | I know that reference |
| ACCEPTED | child, parent | the owner knows the reference that you passed on to me |
| DELETE | holder, owner | the reference is no more |
| SWEEP | owner, all | these workers have died; answer when I know all that you have from them or gave to them |
| SWEPT | all, owner | you do, and I take nothing from them any more |

1. A DELETE is held back until the owner knows the reference and all that were passed on from it, its *children*. So
   for each reference that the owner does not know, it knows one nearer to the root of the tree in which they were
   passed on. What the owner itself passes on, it knows at once.
2. References of the dead stay until no living worker can have one that came from them and is unknown: until all have
   answered a SWEEP that names all the dead. Who gave one to the dead makes it known in their name, as they may have
   passed it on, too. Another death begins the sweep anew: who has died now may have passed on what the others gave.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

FORK, CONFIRMED, ACCEPTED, DELETE, SWEEP, SWEPT = range(6)

Id = tuple[int, int]  # the worker that made it, and a number


class Reference(NamedTuple):
    """The reference `fork` to the value `rref` of the worker `owner`."""

    owner: int
    rref: Id
    fork: Id


class CountingMessage(NamedTuple):
    """A row of the table."""

    kind: int
    ref: Reference | None = None
    number: int = 0  # FORK: the holder; SWEEP, SWEPT: which sweep
    dead: tuple[int, ...] = ()


@dataclass
class Held:
    """A reference of this worker to a value of another one."""

    ref: Reference
    parent: int  # the worker that passed it on; this one, if it made the value
    known: bool  # to the owner
    children: int = 0
    released: bool = False


@dataclass
class Child:
    """A reference that this worker passed on and that the owner may not know."""

    ref: Reference
    parent: Id
    to: int


@dataclass
class Ledger:
    """What one worker knows of references. After each call of a method, send what is in `outbox`, and drop the values
    that `freed` names."""

    me: int
    others: set[int]  # that live
    forks: dict[Id, dict[Id, int]] = field(
        default_factory=dict
    )  # of own values: the holder of each reference
    held: dict[Id, Held] = field(default_factory=dict)
    children: dict[Id, Child] = field(default_factory=dict)
    dead: set[int] = field(default_factory=set)
    sweep: int = 0  # number of the last one
    awaited: set[int] = field(default_factory=set)  # who has not answered it
    owed: dict[int, int] = field(default_factory=dict)  # owner: the sweep that this worker has not answered
    ids: int = 0
    outbox: list[tuple[int, CountingMessage]] = field(default_factory=list)
    freed: list[Id] = field(default_factory=list)

    # ---- what the objects of this worker do -------------------------------------------------------------------------

    def make(self, owner: int) -> Reference:
        """The first reference to a new value; another worker that owns it has to learn of it by a FORK."""
        ref = Reference(owner, self._new_id(), self._new_id())
        if owner == self.me:
            self.forks[ref.rref] = {ref.fork: owner}
        elif owner not in self.dead:
            self.held[ref.fork] = Held(ref, self.me, known=False)
        return ref

    def pass_on(self, ref: Reference, to: int) -> Reference:
        """The reference that a message from here to `to` holds."""
        child = Reference(ref.owner, ref.rref, self._new_id())
        if not {to, ref.owner} & self.dead:  # else nothing arrives, or there is nothing to count
            if ref.owner == self.me:
                self.forks[ref.rref][child.fork] = to
            else:
                self.children[child.fork] = Child(child, ref.fork, to)
                self.held[ref.fork].children += 1
        return child

    def take_back(self, ref: Reference) -> None:
        """The message that holds a child, or makes a value elsewhere, was not sent."""
        if ref.owner == self.me:
            self._delete(ref)
        elif ref.fork in self.children:
            self._accepted(ref)
        else:
            self.held.pop(ref.fork, None)

    def take_in(self, ref: Reference, parent: int) -> bool:
        """A message from `parent` holds this reference. False: it does not count, as its sender has died."""
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
        """Its object is no more."""
        if ref.owner == self.me:
            self._delete(ref)
        elif held := self.held.get(ref.fork):
            held.released = True
            self._settle(held)

    def release_all(self) -> None:
        """All objects of this worker are as if they were no more."""
        for rref, forks in self.forks.copy().items():
            for fork in [fork for fork, holder in forks.items() if holder == self.me]:
                self.release(Reference(self.me, rref, fork))
        for held in list(self.held.values()):
            self.release(held.ref)

    def is_settled(self) -> bool:
        """Whether nobody has references to own values, and this worker has none, and owes no one a message."""
        return not (self.forks or self.held or self.children)

    # ---- what others tell ----------------------------------------------------------------------------------------

    def handle(self, sender: int, message: CountingMessage) -> None:
        """A message of the table has come."""
        if sender in self.dead:
            return
        kind, ref, number, dead = message
        if kind == SWEEP:
            self.owed[sender] = max(number, self.owed.get(sender, 0))  # an older one may come later
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
        """Another worker has ended. What still comes from it counts no more."""
        if worker in self.dead or worker == self.me:
            return
        self.dead.add(worker)
        self.others.discard(worker)
        self.owed.pop(worker, None)
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
            self.died(holder)  # perhaps this worker has no connection by which to see it
        if holder in self.dead and not self.awaited:
            self._begin_sweep()

    def _delete(self, ref: Reference) -> None:
        forks = self.forks.get(ref.rref, {})
        if forks.pop(ref.fork, None) is not None and not forks:
            del self.forks[ref.rref]
            self.freed.append(ref.rref)

    def _confirmed(self, ref: Reference) -> None:
        held = self.held.get(ref.fork)
        if held is None:  # it was made known in the name of the dead
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
        """End a reference whose object is no more, if nothing holds it back."""
        if held.released and held.known and not held.children:
            del self.held[held.ref.fork]
            self._send(held.ref.owner, DELETE, held.ref)

    # ---- the dead ------------------------------------------------------------------------------------------------

    def _of_the_dead(self) -> list[Reference]:
        """References to own values whose holders have died."""
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
        """Answer the sweeps of owners who know all that this worker has from the dead, or gave to them.

        That becomes no more while it waits, unless more workers die: it takes in nothing from the dead.
        """
        if self.owed:
            unknown = {h.ref.owner for h in self.held.values() if not h.known and h.parent in self.dead}
            unknown |= {child.ref.owner for child in self.children.values() if child.to in self.dead}
            for owner in self.owed.keys() - unknown:
                self._send(owner, SWEPT, None, self.owed.pop(owner))

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
