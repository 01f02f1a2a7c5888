"""Messages over connections: frames cut anywhere, invalid frames, the window, RESTs, and connections that break."""

from __future__ import annotations

import re
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
from messages.worlds import COMPILES, DEADLINE, Rank, WireWorld, pattern, pipe_to, taken, tcp_pair, until
from together import together

from fastcoll.errors import AbortedError, GroupError, PeerDiedError
from fastcoll.net.tcp import pipe
from fastcoll.net.tcp.mail_frames import EAGER, IN_GONE, MESSAGE, REST, TYPE_BITS, WINDOW
from fastcoll.p2p.pipe import TAKEN
from fastcoll.p2p.transfers import kind_of
from net.meshes import alarm, nothing_left, open_descriptors

BYTES = kind_of(0, np.dtype("u1"))


@pytest.fixture
def world() -> Iterator[WireWorld]:
    with closing(WireWorld(2)) as made:
        yield made


def connect(world: WireWorld, rank: int, pair: tuple[socket.socket, socket.socket]) -> socket.socket:
    """Let `rank` use one end of a pair as its connection with the other rank; return the other end."""
    ours, theirs = pair
    world.meshes[1 - rank].others.append(ours)  # closed with the world
    world.meshes[rank].take(1 - rank, theirs)
    return ours


def a_stranger(world: WireWorld, rank: int = 1) -> socket.socket:
    """Return the other end of the connection of `rank` with the other rank."""
    return connect(world, rank, tcp_pair())


def frame(first: int, kind: int = BYTES, nbytes: int = 0, attached: int = 0, number: int = 1) -> bytes:
    return np.array([first | number << TYPE_BITS, kind, nbytes, attached], np.int64).tobytes()


def message(data: bytes, number: int = 1, kind: int = BYTES) -> bytes:
    return frame(MESSAGE, kind, len(data), len(data), number) + data


def dribble(connection: socket.socket, data: bytes, seed: int) -> None:
    """Send data in parts of any size, each a segment of its own."""
    random = np.random.default_rng(seed)
    while data:
        size = int(random.choice([1, 7, 31, 33, 1000, 70_000]))
        connection.sendall(data[:size])
        data = data[size:]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("how", ["blocking", "posted before", "posted one by one"])
def test_frames_cut_anywhere(world: WireWorld, how: str, seed: int) -> None:
    me, stranger = world.ranks[1], a_stranger(world)
    sizes = [0, 1, 8, 100, 5000, 9000, EAGER]
    data = b"".join(message(pattern(n, k).tobytes(), k + 1) for k, n in enumerate(sizes))
    arrays = [np.zeros(n, "u1") for n in sizes]

    def receive() -> None:
        works = [me.irecv(got, 0) for got in arrays] if how == "posted before" else []
        for k, got in enumerate(arrays):
            work = works[k] if works else me.irecv(got, 0) if how != "blocking" else None
            assert (work.result() if work else me.recv(got, 0)) == 0
            assert (got == pattern(sizes[k], k)).all(), sizes[k]

    assert together(receive, lambda: dribble(stranger, data, seed), deadline=COMPILES) == [None, None]
    answers = stranger.recv(32 * len(sizes), socket.MSG_WAITALL)
    assert answers == b"".join(frame(TAKEN, nbytes=n, number=k + 1) for k, n in enumerate(sizes))


def test_acks_of_posted_receives_wait_for_space(world: WireWorld) -> None:
    """The sender reads no acks until many more are due than the connection buffers."""
    here, there = socket.socketpair()  # a few hundred acks fill it
    there.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    connect(world, 1, (here, there))
    count, done = 1000, []

    def receive() -> None:
        for _ in range(count):
            got = np.zeros(1, "u1")
            world.ranks[1].irecv(got, 0).wait()
            done.append(int(got[0]))

    def send() -> bytes:
        here.sendall(b"".join(message(bytes([n % 256]), n + 1) for n in range(count)))
        until(lambda: world.ranks[1].is_blocked() and 0 < len(done) < count)
        return here.recv(32 * count, socket.MSG_WAITALL)

    _, answers = together(receive, send)
    assert done == [n % 256 for n in range(count)]
    assert answers == b"".join(frame(TAKEN, nbytes=1, number=n + 1) for n in range(count))


@pytest.mark.long
@pytest.mark.parametrize("nbytes", [0, 8000])
def test_both_fill_the_connection_before_either_receives(world: WireWorld, nbytes: int) -> None:
    """Frames are partly sent on both sides, and the acks of messages received meanwhile wait for them."""
    ends = tcp_pair()
    for rank, end in enumerate(ends):
        world.meshes[rank].take(1 - rank, end)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    count = 600
    posted = threading.Barrier(2)

    def program(me: Rank) -> None:
        peer = 1 - me.rank
        works = [me.isend(pattern(nbytes, n), peer) for n in range(count)]
        posted.wait(DEADLINE)
        for n in range(count):
            got = np.zeros(nbytes, "u1")
            work = me.irecv(got, peer)  # one at a time, which `advance` completes by itself
            assert work.wait(DEADLINE)
            assert (got == pattern(nbytes, n)).all(), n
        assert all(work.wait(DEADLINE) for work in works)

    world.run(program, program)


def test_a_blocking_send_reads_a_message_before_its_ack(world: WireWorld) -> None:
    def exchange(me: Rank) -> None:
        peer, got = 1 - me.rank, np.zeros(3)
        for n in range(50):
            posted = me.isend(np.full(3, float(n)), peer, 7) if me.rank else None
            me.recv(got[:2], peer) if posted else me.send(np.full(2, float(n)), peer)
            assert posted is None or posted.wait(DEADLINE)
            assert posted or me.recv(got, peer, 7) == peer
            assert (got[:2] == n).all()

    world.run(exchange, exchange)


GARBAGE = {
    "an unknown type": frame(3),
    "zeros": bytes(32),
    "text": b"GET / HTTP/1.1\r\nHost: somewhere\r\n",
    "a REST that was not requested": frame(REST, nbytes=5),
    "an ack of a message that was not sent": frame(TAKEN),
    "a negative length": frame(MESSAGE, nbytes=-1),
    "a length of 2**63": frame(MESSAGE, nbytes=-(1 << 63)),
    "a negative kind": frame(MESSAGE, kind=-5, nbytes=8, attached=8),
    "more than may be attached": frame(MESSAGE, nbytes=1 << 40, attached=1 << 40),
    "less than is attached": frame(MESSAGE, nbytes=8, attached=16),
    "a negative attachment": frame(MESSAGE, nbytes=8, attached=-16),
}


@pytest.mark.parametrize("posted", [False, True])
@pytest.mark.parametrize("what", GARBAGE)
def test_an_invalid_frame_fails_the_group(world: WireWorld, what: str, posted: bool) -> None:
    me = world.ranks[1]
    a_stranger(world).sendall(GARBAGE[what])
    got = np.zeros(3, "u1")
    with pytest.raises(AbortedError, match=r"rank 0 .*invalid frame"):
        me.irecv(got, 0).wait(DEADLINE) if posted else me.recv(got, 0)
    assert not got.any()
    assert me.monitor.failure is not None


def test_a_sender_that_exceeds_the_window_is_refused(world: WireWorld) -> None:
    stranger = a_stranger(world)
    messages = message(bytes(EAGER)) * (WINDOW // EAGER + 2)
    error, _ = together(
        lambda: world.ranks[1].recv(np.zeros(1, "u1"), 0, 5), lambda: stranger.sendall(messages)
    )
    assert isinstance(error, AbortedError)
    assert "invalid frame" in str(error)


@pytest.mark.parametrize("posted", [False, True])
@pytest.mark.parametrize(
    "ack",
    [frame(0), frame(4), frame(77), frame(3), frame(1, number=9)],
    ids=["0", "4", "77", "a GO for what is complete", "of a message that was never sent"],
)
def test_a_garbled_ack(world: WireWorld, ack: bytes, posted: bool) -> None:
    a_stranger(world, 0).sendall(ack)
    me = world.ranks[0]
    with pytest.raises(AbortedError, match=r"rank 1 .*invalid frame"):
        me.isend(np.zeros(3), 1).wait(DEADLINE) if posted else me.send(np.zeros(3), 1)


def test_messages_beyond_the_window_wait_at_the_sender(world: WireWorld) -> None:
    """They are received in reverse: the receiver stores a bounded part, and the rest is sent on request."""
    count, nbytes = 3 * WINDOW // EAGER, EAGER + 100
    works = [world.ranks[0].isend(pattern(nbytes, tag), 1, tag) for tag in range(count)]
    peer = world.ranks[1].mailbox._exchange.peers[0]
    most = 0
    for tag in reversed(range(count)):
        assert (taken(world.ranks[1], nbytes, 0, tag) == pattern(nbytes, tag)).all(), tag
        most = max(most, peer.kept)
    assert 0 < most <= WINDOW
    assert all(work.wait(DEADLINE) for work in works)
    assert (peer.kept, peer.kept_messages) == (0, 0)
    assert world.ranks[0].mailbox._exchange.peers[1].credit == WINDOW


def test_a_small_message_passes_a_large_one_without_a_receive(world: WireWorld) -> None:
    for_tag = {1: pattern(20 << 20), 2: np.arange(4)}
    slow, quick = (world.ranks[0].isend(x, 1, tag) for tag, x in for_tag.items())
    for tag, work in ((2, quick), (1, slow)):
        assert not slow.is_completed()
        x = for_tag[tag]
        assert (taken(world.ranks[1], x.size, 0, tag, x.dtype) == x).all()
        assert work.wait(DEADLINE)


def test_messages_arrive_before_the_rest_of_another(world: WireWorld) -> None:
    """A blocking receive waits for the REST of its message, and other messages arrive first."""
    stranger = a_stranger(world)
    large = pattern(EAGER + 10)

    def send() -> None:
        stranger.sendall(frame(MESSAGE, nbytes=EAGER + 10, attached=EAGER) + large[:EAGER].tobytes())
        assert stranger.recv(32, socket.MSG_WAITALL)[0] == 3  # GO
        stranger.sendall(message(b"12345", 2, kind_of(8, np.dtype("u1"))))
        stranger.sendall(frame(REST, kind=0, nbytes=10) + large[EAGER:].tobytes())

    got, _ = together(lambda: taken(world.ranks[1], large.size, 0), send)
    assert (got == large).all()
    assert taken(world.ranks[1], 5, 0, 8).tobytes() == b"12345"


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait long for the reason of a broken connection."""
    monkeypatch.setattr(pipe, "_REASON_SECONDS", 0.2)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("how", [socket.SHUT_WR, socket.SHUT_RDWR])
def test_a_connection_that_ends_without_a_reason_is_a_dead_peer(world: WireWorld, how: int) -> None:
    me, stranger = world.ranks[1], a_stranger(world)
    stranger.sendall(frame(MESSAGE, nbytes=100, attached=100) + bytes(50))
    error, _ = together(
        lambda: me.recv(np.zeros(100, "u1"), 0), lambda: until(me.is_blocked) and stranger.shutdown(how)
    )
    assert isinstance(error, PeerDiedError)
    assert re.search(r"rank 0 .*connection for messages", str(error))


@pytest.mark.usefixtures("hasty")
def test_a_reset_in_the_middle_of_a_send(world: WireWorld) -> None:
    me, peer = world.ranks
    work = me.isend(np.zeros(20 << 20), 1)
    me.await_on_the_way(1, 1)
    connection = world.meshes[1].connections[0]
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    peer.mailbox.close(None)
    connection.close()
    with pytest.raises(PeerDiedError, match=r"rank 1 .*connection for messages"):
        work.wait(DEADLINE)


def test_the_reason_of_a_peer_is_raised_rather_than_its_death(world: WireWorld) -> None:
    me, peer = world.ranks
    me.isend(np.zeros(3), 1)
    me.await_on_the_way(1, 1)
    peer.monitor.fail(AbortedError("out of luck"))
    world.meshes[1].connections[0].close()
    with pytest.raises(AbortedError, match="out of luck"):
        me.recv(np.zeros(3), 1)


def test_a_peer_that_has_left_may_close_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is no death, also for a receive that other ranks may complete."""
    monkeypatch.setattr(pipe, "_REASON_SECONDS", -1.0)
    with closing(WireWorld(3)) as world:
        me, gone, there = world.ranks
        gone.isend(np.zeros(3), 0)
        me.recv(np.zeros(3), 1)
        work = me.irecv(np.zeros(3))
        gone.monitor.leave()
        world.meshes[1].connections[0].shutdown(socket.SHUT_RDWR)
        until(lambda: pipe_to(me, 1)[0].word(1, IN_GONE))
        looked = me.mailbox.progress.checks.next
        until(lambda: me.mailbox.progress.checks.next > looked or work.is_completed())
        there.send(np.ones(3), 0)
        assert work.result() == 2


@pytest.mark.parametrize("posted", [False, True])
def test_a_peer_that_cannot_be_reached_fails_the_group(world: WireWorld, posted: bool) -> None:
    me = world.ranks[0]

    def refuse(peer: int) -> socket.socket:
        raise PeerDiedError(f"rank {peer} is not there")

    world.meshes[0].mail = refuse  # type: ignore[method-assign]
    waiting = me.irecv(np.zeros(1), 1)
    with pytest.raises(GroupError, match="rank 1 is not there"):
        me.isend(np.zeros(3), 1).wait(DEADLINE) if posted else me.send(np.zeros(3), 1)
    with pytest.raises(GroupError, match="rank 1 is not there"):
        waiting.wait(DEADLINE)


def test_a_silenced_bell_is_not_readable(world: WireWorld) -> None:
    """A readable bell would keep poll(2) from sleeping."""
    me = world.ranks[0]
    me.irecv(np.zeros(1), 1, 1)
    me.mailbox.abort()
    until(lambda: not select.select([pipe_to(me, 1)[0]._bell], [], [], 0)[0])


@pytest.mark.timed
def test_a_waiting_rank_sleeps(world: WireWorld) -> None:
    """A receive without a message takes no CPU time."""
    me = world.ranks[0]
    posted = me.irecv(np.zeros(1), 1, 1)
    until(lambda: me.mailbox.progress.checks.next > 0)
    before = time.process_time()
    with pytest.raises(TimeoutError):
        posted.wait(1.0)
    assert time.process_time() - before < 0.2


def test_nothing_is_left_open() -> None:
    def program(me: Rank) -> None:
        works = [me.isend(np.ones(3), peer) for peer in range(3)]
        works += [me.irecv(np.zeros(3), peer) for peer in range(3)]
        assert all(work.wait(DEADLINE) for work in works)

    with nothing_left():
        world = WireWorld(3)
        world.run(program, program, program)
        world.close()


@pytest.mark.parametrize("posted", [False, True])
def test_a_handler_that_closes_the_engine_in_a_call_leaves_no_descriptor(
    world: WireWorld, posted: bool
) -> None:
    me = world.ranks[0]
    sent = me.isend(np.zeros(1), 1)  # with its connection
    world.ranks[1].recv(np.zeros(1), 0)
    sent.wait()  # so that only the receive below blocks
    bells = count_bells()

    with (
        alarm(lambda *_: me.mailbox.close(None), me.is_blocked),
        pytest.raises(AbortedError, match="destroyed"),
    ):
        me.irecv(np.zeros(1), 1).wait() if posted else me.recv(np.zeros(1), 1)
    assert count_bells() == bells - 1


def count_bells() -> int:
    return sum("eventfd" in name for name in open_descriptors().values())
