"""The protocol of fastcoll/gpu/nccl/messages.py as a model, explored over every schedule of small worlds.

A rank has a program of sends, receives and waits, and one stream; any rank, thread or GPU may take its next action. The
mailbox keeps the order of what one rank sends another. A communicator pairs what its two ranks queue in that order,
whatever it is: if those do not belong together, the test has found a fault, and so it has when nothing can go on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest

Pair = tuple[int, int]


class Op(NamedTuple):
    """What a rank does: "send" to a peer, "recv" from it or any (None), "wait" for its operation number `peer`."""

    what: str
    peer: int | None
    tag: int = 0


class Rules(NamedTuple):
    """The protocol's, or with a fault."""

    thread_a_direction: bool = True
    communicator_a_direction: bool = True
    sends_what_is_answered: bool = True
    wait_blocks_until_queued: bool = True
    follows_the_stream_when_posted: bool = True


class Post(NamedTuple):
    """A send or receive: its rank and place in the program."""

    rank: int
    place: int


Partners = tuple[Post, Post]
"""A send and the receive that it was matched with."""


class Link(NamedTuple):
    """A direction: envelopes on their way, what its two threads do, and what is queued."""

    flying: tuple[Post, ...] = ()
    jobs: tuple[Partners, ...] = ()
    answers: tuple[Post, ...] = ()
    due: int = 0
    sender: Post | str = "idle"
    receiver: Post | str = "idle"
    connected: bool = False
    sends: tuple[Post, ...] = ()
    receives: tuple[Post, ...] = ()


class State(NamedTuple):
    """All of it; `lines`: what each rank has queued for each peer, in order, for a communicator a pair."""

    at: tuple[int, ...]
    waits: tuple[frozenset[Post], ...]
    links: tuple[Link, ...]
    posted: tuple[tuple[Post, ...], ...]
    stored: tuple[tuple[Post, ...], ...]
    marks: frozenset[tuple[Post, frozenset[Post]]] = frozenset()
    partners: frozenset[Partners] = frozenset()
    begun: frozenset[Post] = frozenset()
    done: frozenset[Post] = frozenset()
    lines: tuple[tuple[Post, ...], ...] = ()


class Model:
    """All ranks over their programs."""

    def __init__(self, programs: Sequence[Sequence[Op]], rules: Rules | None = None) -> None:
        self.programs, self.rules, size = programs, rules or Rules(), len(programs)
        self.pairs = [(a, b) for a in range(size) for b in range(size) if a != b]
        self.first = State(
            (0,) * size,
            (frozenset(),) * size,
            (Link(),) * len(self.pairs),
            ((),) * size,
            ((),) * size,
            lines=((),) * len(self.pairs),
        )

    def explore(self) -> int:
        """Visit all states; how many there are."""
        seen, left = {self.first}, [self.first]
        while left:
            state = left.pop()
            following = set(self.after(state))
            assert following or self.is_over(state), f"deadlock: {state}"
            left += following - seen
            seen |= following
        return len(seen)

    def is_over(self, state: State) -> bool:
        posts = sum(op.what != "wait" for program in self.programs for op in program)
        return len(state.done) == posts and all(
            at == len(program) for at, program in zip(state.at, self.programs, strict=True)
        )

    def op(self, post: Post) -> Op:
        return self.programs[post.rank][post.place]

    def after(self, state: State) -> Iterator[State]:
        for rank in range(len(self.programs)):
            yield from self.user(state, rank)
        for place, pair in enumerate(self.pairs):
            yield from self.mailbox(state, place, pair)
            yield from self.threads(state, place, pair)
            yield from self.gpus(state, place, pair)

    # ---- what a rank's program does ------------------------------------------------------------------

    def user(self, state: State, rank: int) -> Iterator[State]:
        place = state.at[rank]
        if place == len(self.programs[rank]):
            return
        post = Post(rank, place)
        op = self.op(post)
        state = state._replace(at=put(state.at, rank, place + 1))
        if op.what == "wait":
            assert op.peer is not None
            awaited = Post(rank, op.peer)
            if awaited in state.begun or not self.rules.wait_blocks_until_queued:
                yield state._replace(waits=put(state.waits, rank, state.waits[rank] | {awaited}))
            return
        state = state._replace(marks=state.marks | {(post, state.waits[rank])})
        if op.what == "recv":
            yield self.receive(state, post, op)
            return
        assert op.peer is not None
        link = self.pairs.index((rank, op.peer))
        state = self.link(state, link, flying=(*state.links[link].flying, post))
        yield state if self.rules.sends_what_is_answered else self.queue(state, link, "sends", post)

    def receive(self, state: State, post: Post, op: Op) -> State:
        for send in state.stored[post.rank]:
            if self.op(send).tag == op.tag and op.peer in (None, send.rank):
                kept = tuple(other for other in state.stored[post.rank] if other != send)
                return self.match(state._replace(stored=put(state.stored, post.rank, kept)), send, post)
        return state._replace(posted=put(state.posted, post.rank, (*state.posted[post.rank], post)))

    # ---- the mailbox ---------------------------------------------------------------------------------

    def mailbox(self, state: State, place: int, pair: Pair) -> Iterator[State]:
        if not state.links[place].flying:
            return
        (send, *rest), here = state.links[place].flying, pair[1]
        state = self.link(state, place, flying=tuple(rest))
        for receive in state.posted[here]:
            op = self.op(receive)
            if op.tag == self.op(send).tag and op.peer in (None, send.rank):
                kept = tuple(other for other in state.posted[here] if other != receive)
                yield self.match(state._replace(posted=put(state.posted, here, kept)), send, receive)
                return
        yield state._replace(stored=put(state.stored, here, (*state.stored[here], send)))

    def match(self, state: State, send: Post, receive: Post) -> State:
        place = self.pairs.index((send.rank, receive.rank))
        link = state.links[place]
        state = state._replace(partners=state.partners | {(send, receive)})
        return self.link(state, place, jobs=(*link.jobs, (send, receive)), due=link.due + 1)

    # ---- the directions' threads ---------------------------------------------------------------------

    def threads(self, state: State, place: int, pair: Pair) -> Iterator[State]:
        link = state.links[place]
        if link.receiver == "idle" and link.jobs and self.is_free(state, pair[1]):
            (send, receive), *rest = link.jobs
            answered = self.link(state, place, jobs=tuple(rest), answers=(*link.answers, send))
            if link.connected or not self.rules.sends_what_is_answered:
                yield self.queue(answered, place, "receives", receive)
            else:
                yield self.link(answered, place, receiver=receive)
        if not self.rules.sends_what_is_answered:
            return
        if link.sender == "idle" and link.due and self.is_free(state, pair[0]):
            yield self.link(state, place, due=link.due - 1, sender="awaits an answer")
        if link.sender == "awaits an answer" and link.answers:
            send, *others = link.answers
            took = self.link(state, place, answers=tuple(others), sender="idle" if link.connected else send)
            yield self.queue(took, place, "sends", send) if link.connected else took
        if isinstance(link.sender, Post) and isinstance(link.receiver, Post):  # both make the communicator
            met = self.link(state, place, sender="idle", receiver="idle", connected=True)
            yield self.queue(self.queue(met, place, "sends", link.sender), place, "receives", link.receiver)

    def is_free(self, state: State, rank: int) -> bool:
        """Whether the thread that a new job needs does nothing else."""
        if self.rules.thread_a_direction:
            return True
        ends = zip(self.pairs, state.links, strict=True)
        return not any(
            (pair[0] == rank and link.sender != "idle") or (pair[1] == rank and link.receiver != "idle")
            for pair, link in ends
        )

    # ---- the GPUs ------------------------------------------------------------------------------------

    def queue(self, state: State, place: int, side: str, post: Post) -> State:
        if not self.rules.follows_the_stream_when_posted:
            posted = next(mark for mark in state.marks if mark[0] == post)
            state = state._replace(marks=state.marks - {posted} | {(post, state.waits[post.rank])})
        state = state._replace(begun=state.begun | {post})
        if self.rules.communicator_a_direction:
            return self.link(state, place, **{side: (*getattr(state.links[place], side), post)})
        pair = self.pairs[place]
        line = self.pairs.index(pair if side == "sends" else pair[::-1])
        return state._replace(lines=put(state.lines, line, (*state.lines[line], post)))

    def gpus(self, state: State, place: int, pair: Pair) -> Iterator[State]:
        if self.rules.communicator_a_direction:
            link = state.links[place]
            if link.sends and link.receives and self.may_run(state, link.sends[0], link.receives[0]):
                over = self.over(state, link.sends[0], link.receives[0])
                yield self.link(over, place, sends=link.sends[1:], receives=link.receives[1:])
            return
        other = self.pairs.index(pair[::-1])
        mine, theirs = state.lines[place], state.lines[other]
        if not mine or not theirs or (self.op(mine[0]).what, self.op(theirs[0]).what) != ("send", "recv"):
            return
        if self.may_run(state, mine[0], theirs[0]):
            lines = put(put(state.lines, place, mine[1:]), other, theirs[1:])
            yield self.over(state, mine[0], theirs[0])._replace(lines=lines)

    def may_run(self, state: State, *posts: Post) -> bool:
        return all(marks <= state.done for post, marks in state.marks if post in posts)

    def over(self, state: State, send: Post, receive: Post) -> State:
        assert (send, receive) in state.partners, f"{receive} gets another message, {send}"
        return state._replace(done=state.done | {send, receive})

    def link(self, state: State, place: int, **changes: Any) -> State:
        return state._replace(links=put(state.links, place, state.links[place]._replace(**changes)))


def put(items: tuple[Any, ...], place: int, item: Any) -> tuple[Any, ...]:
    return (*items[:place], item, *items[place + 1 :])


def send(peer: int, tag: int = 0) -> Op:
    return Op("send", peer, tag)


def recv(peer: int | None, tag: int = 0) -> Op:
    return Op("recv", peer, tag)


def wait(place: int) -> Op:
    return Op("wait", place)


CROSSING = [[send(1), recv(1), wait(0), wait(1), send(1)], [send(0), recv(0), wait(1), wait(0), recv(0)]]
TWICE = [
    [send(peer), recv(peer), wait(1), send(peer), recv(peer), wait(4)] for peer in (1, 0)
]  # the second time there are communicators
TAGS = [[send(1, 1), send(1, 2), send(1, 1)], [recv(0, 2), recv(0, 1), wait(0), recv(0, 1), wait(1)]]
LATE = [[send(1, 1), send(1, 2)], [recv(0, 2), wait(0), recv(0, 1)]]
PING = [[send(1), recv(1), wait(1), send(1)], [recv(0), wait(0), send(0), recv(None)]]
ANY = [[recv(None), recv(None), wait(0), send(1), send(2)], [send(0), recv(0)], [send(0), recv(0), wait(1)]]
RING = [[send(1), recv(2), wait(1)], [send(2), recv(0), wait(1)], [send(0), recv(1), wait(1)]]
BOTH_WAYS = [[send(2), recv(1)], [send(0), recv(2)], [send(1), recv(0)]]
WORLDS = {
    "crossing": CROSSING, "twice": TWICE, "tags": TAGS, "late": LATE, "ping": PING, "any source": ANY, "ring": RING,
    "the other way round": BOTH_WAYS,
}  # fmt: skip


@pytest.mark.parametrize("name", WORLDS)
def test_every_schedule_ends_well(name: str) -> None:
    assert Model(WORLDS[name]).explore() > 20


FAULTS = {
    "one thread for all directions": (RING, Rules(thread_a_direction=False), "deadlock"),
    "one communicator for both directions": (TWICE, Rules(communicator_a_direction=False), "deadlock"),
    "what is posted is sent at once": (TAGS, Rules(sends_what_is_answered=False), "another message"),
    "wait() does not wait until it is queued": (LATE, Rules(wait_blocks_until_queued=False), "deadlock"),
    "streams are followed when a message is queued": (
        TWICE, Rules(follows_the_stream_when_posted=False), "deadlock",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_the_model_finds(name: str) -> None:
    programs, rules, message = FAULTS[name]
    with pytest.raises(AssertionError, match=message):
        Model(programs, rules).explore()
