"""The server's state machine, without sockets: every split of the bytes, corruption, secrets."""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcoll.store import table
from fastcoll.store.frames import (
    HEADER,
    MAX_BODY,
    ProtocolError,
    ReplyStatus,
    check_answer,
    check_request_header,
    decode_answer,
    decode_fields,
    decode_request,
    encode_frame,
    encode_request,
)
from fastcoll.store.opening import (
    GROUP_SIZE,
    OPENING_SIZE,
    PROOF_SIZE,
    ConnectionKind,
    Dialing,
    Endpoint,
    Opening,
    OpeningResult,
    Role,
    prove,
)
from fastcoll.store.store_protocol import FRAME_SECONDS, MOST_OPENINGS, OPENING_SECONDS, StoreServer
from fastcoll.store.table import SHAPES, Op, StoreRequest

SECRET = b"a secret"
Answers = list[tuple[ReplyStatus, list[bytes]]]


def ok(*fields: bytes) -> Answers:
    """Return one answer: that the request has succeeded."""
    return [(ReplyStatus.OK, [*fields])]


class Wire:
    """A server with `peers` whose openings are complete; records what it sends to each peer, and why it drops it."""

    def __init__(self, *peers: int, secret: bytes = b"", timeout: float = 1.0) -> None:
        self.server = StoreServer(secret, timeout)
        self.now = 0.0
        self.sent: dict[int, bytes] = {}
        self.dropped: dict[int, str] = {}
        for peer in peers:
            self.open(peer)

    def connect(self, peer: int, data: bytes = b"") -> None:
        """Connect, and send the first data."""
        self.sent[peer] = b""
        self.server.connect(peer, self.now)
        self.feed(peer, data)

    def open(self, peer: int) -> None:
        """Connect to a server without a secret, and complete the opening."""
        self.connect(peer, hello())
        assert len(self.take(peer)) == OPENING_SIZE

    def feed(self, peer: int, data: bytes) -> None:
        if data:
            self.server.receive(peer, data, self.now)
        self.collect()

    def end(self, peer: int) -> str:
        """End a connection; return the reason with which the server drops the peer."""
        self.server.end(peer)
        self.collect()
        return self.dropped[peer]

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.server.expire(self.now)
        self.collect()

    def collect(self) -> None:
        for peer, data in self.server.outbox:
            self.sent[peer] += data
        for peer, reason in self.server.drops:
            self.dropped[peer] = reason
        self.server.outbox.clear()
        self.server.drops.clear()

    def take(self, peer: int) -> bytes:
        data, self.sent[peer] = self.sent[peer], b""
        return data

    def ask(self, peer: int, op: Op, *parts: bytes, timeout: float = 9.0) -> Answers:
        count = 0 if not parts else len(parts) // (1 + SHAPES[op][2])
        self.feed(peer, encode_request(StoreRequest(op, parts[:count], parts[count:], timeout)))
        return self.answers(peer)

    def answers(self, peer: int) -> Answers:
        return parse_answers(self.take(peer))


def hello(secret: bool = False, **changes: Any) -> bytes:
    me = Endpoint(bytes(GROUP_SIZE), 1, 2, b"", secret)
    opening = Opening.of(me, Role.DIALS, ConnectionKind.STORE, 0, 0, OpeningResult.WELCOME)
    return opening._replace(**changes).to_bytes()


def parse_answers(data: bytes) -> Answers:
    answers = []
    while data:
        length = HEADER.unpack(data[: HEADER.size])[2]
        end = HEADER.size + length
        answers.append(decode_answer(data[: HEADER.size], data[HEADER.size : end]))
        data = data[end:]
    return answers


keys = st.sampled_from([b"", b"a", b"b", b"long" * 50])
values = st.binary(max_size=40) | st.sampled_from([b"1", b"-5"])


@st.composite
def requests(draw: st.DrawFn) -> StoreRequest:
    op = draw(st.sampled_from(list(Op)))
    fewest, most, per_key = SHAPES[op]
    names = draw(st.lists(keys, min_size=fewest, max_size=min(most, 3)))
    contents = draw(st.lists(values, min_size=per_key * len(names), max_size=per_key * len(names)))
    return StoreRequest(op, tuple(names), tuple(contents), draw(st.sampled_from([0.0, 1.0, 1e9])))


@given(requests())
def test_requests_survive_the_wire(request: StoreRequest) -> None:
    data = encode_request(request)
    header, body = data[: HEADER.size], data[HEADER.size :]
    assert check_request_header(header) == len(body)
    assert decode_request(header, body) == request


@given(st.lists(requests(), max_size=8), st.data())
def test_how_the_bytes_are_split_does_not_matter(script: list[StoreRequest], data: st.DataObject) -> None:
    whole, split = Wire(), Wire()
    for wire in (whole, split):
        wire.connect(1)
    for message in (hello(), *map(encode_request, script)):
        whole.feed(1, message)
        cuts = data.draw(st.lists(st.integers(0, len(message)), max_size=4).map(sorted))
        for start, end in zip([0, *cuts], [*cuts, len(message)], strict=True):
            split.feed(1, message[start:end])
    assert whole.take(1)[OPENING_SIZE:] == split.take(1)[OPENING_SIZE:]
    assert whole.dropped == split.dropped


@pytest.mark.parametrize("key", [b"set", b"unset"])
def test_bytes_after_an_unanswered_request_drop_the_peer(key: bytes) -> None:
    """Otherwise a few bytes would queue an unlimited number of answers."""
    wire = Wire(1, 2)
    wire.ask(2, Op.SET, b"set", bytes(1000))
    wire.feed(1, 40 * encode_request(StoreRequest(Op.GET, (key,))))
    wire.ask(2, Op.GET, b"unset")
    wire.feed(2, b"x")
    assert wire.take(1) == b""
    assert wire.dropped == dict.fromkeys((1, 2), "sent data before its request was answered")
    assert wire.server._parked == {}


@settings(max_examples=300)
@given(st.lists(requests(), max_size=5), st.data())
def test_corruption_affects_no_other_peer(script: list[StoreRequest], data: st.DataObject) -> None:
    stream = bytearray(hello() + b"".join(map(encode_request, script)))
    for at in data.draw(st.lists(st.integers(0, len(stream) - 1), min_size=1, max_size=4)):
        stream[at] = data.draw(st.integers(0, 255))
    wire = Wire(1)
    wire.connect(2, bytes(stream))
    wire.pass_time(1.0)
    assert wire.ask(1, Op.SET, b"mine", b"1") == ok()
    assert wire.ask(1, Op.GET, b"mine") == ok(b"1")
    assert 1 not in wire.dropped


@pytest.mark.parametrize(
    "start", [b"GET / HTTP/1.1\r\n", b"\x16\x03\x01\x02", b"*1\r\n$4\r\nPING", b"\0", b"F\0"]
)
def test_strangers_are_dropped_at_their_first_wrong_byte(start: bytes) -> None:
    wire = Wire()
    wire.connect(1)
    for byte in start:
        wire.feed(1, bytes([byte]))
    assert "not a rank of fastcoll" in wire.dropped[1]
    wire.feed(1, b"more")
    assert wire.take(1) == b""


WRONG_HEADERS = [
    ((Op.SET, 1, 1 << 31, 1.0), "announces 2147483648 bytes"),
    ((Op.GET, 1, MAX_BODY + 1, 1.0), "announces"),
    ((Op.GET, 65535, 8, 1.0), "takes 1 to 1024 keys"),
    ((Op.ADD, 2, 8, 1.0), "ADD takes 1 to 1 keys"),
    *(((Op.GET, 1, 8, timeout), "timeout") for timeout in (-1.0, float("nan"), float("inf"))),
    *(((op, 1, 8, 1.0), f"no operation {op}") for op in (0, 200)),
]
WRONG_BODIES = [
    (b"\0\0", "length is truncated"),
    (struct.pack("!I", 2**31), "exceeds its frame"),
    (struct.pack("!I", 2**32 - 1) + b"abc", "exceeds its frame"),
    (struct.pack("!I", 0) * 3, "has 3 fields"),
    (b"", "has 0 fields"),
]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        *((HEADER.pack(*header), reason) for header, reason in WRONG_HEADERS),
        *((HEADER.pack(Op.GET, 1, len(body), 1.0) + body, reason) for body, reason in WRONG_BODIES),
    ],
    ids=lambda value: value if isinstance(value, str) else "frame",
)
def test_a_wrong_header_or_body_drops_its_peer(data: bytes, reason: str) -> None:
    """A header is checked before its body is read; fields must fill their frame."""
    wire = Wire(1)
    wire.feed(1, data)
    assert reason in wire.dropped[1]


def test_a_key_that_is_not_text_drops_its_peer() -> None:
    """Other clients could not list it."""
    wire = Wire(1)
    wire.feed(1, encode_request(StoreRequest(Op.SET, (b"\xff",), (b"\xff",))))
    assert "the key b'\\xff' is not UTF-8" in wire.dropped[1]


OK, TIMEOUT, REFUSED = ReplyStatus


@pytest.mark.parametrize(
    ("op", "status", "fields"),
    [
        (Op.GET, OK, []),
        (Op.GET, OK, [b"1", b"2"]),
        (Op.SET, OK, [b"1"]),
        (Op.ADD, OK, [b"x"]),
        (Op.CHECK, OK, [b"2"]),
        (Op.POP, OK, []),
        (Op.SET_NEW, OK, []),
        (Op.SET_NEW, OK, [b"", b""]),
        (Op.KEYS, OK, [b"a"]),
        (Op.KEYS, OK, [b"c", b"b"]),
        (Op.KEYS, OK, [b"\xff"]),
        (Op.GET, TIMEOUT, []),
        (Op.GET, TIMEOUT, [b"x"]),
        (Op.GET, TIMEOUT, [b"1" * 5000]),
        (Op.GET, TIMEOUT, [b"1", b"another"]),
        (Op.SET, TIMEOUT, [b"1"]),
        (Op.GET, REFUSED, []),
    ],
)
def test_an_answer_must_fit_its_request(op: Op, status: ReplyStatus, fields: list[bytes]) -> None:
    """Otherwise a client would raise another exception, or ask for ever."""
    with pytest.raises(ProtocolError):
        check_answer(StoreRequest(op, (b"a",), (b"1",) * SHAPES[op][2]), status, fields)


@given(st.lists(requests(), max_size=30))
def test_the_answers_of_a_server_fit_their_requests(made: list[StoreRequest]) -> None:
    wire = Wire(1)
    for request in made:
        wire.feed(1, encode_request(request))
        wire.pass_time(request.timeout + 1)
        for answer in wire.answers(1):
            check_answer(request, *answer)


@given(st.binary(max_size=200))
def test_bodies_are_parsed_or_refused(body: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        assert encode_frame(0, decode_fields(body))[HEADER.size :] == body


def test_slow_openings_are_dropped_and_slow_requests_have_longer() -> None:
    wire = Wire()
    wire.connect(1, hello()[:-1])
    wire.open(2)
    wire.feed(2, b"\x01")
    wire.pass_time(OPENING_SECONDS - 0.01)
    assert not wire.dropped
    wire.pass_time(0.02)
    assert list(wire.dropped) == [1]
    assert wire.server.next_deadline() == FRAME_SECONDS


@pytest.mark.parametrize("begun", [1, HEADER.size - 1, HEADER.size, HEADER.size + 1])
def test_a_peer_that_stalls_within_a_request_is_dropped(begun: int) -> None:
    wire = Wire(1)
    request = encode_request(StoreRequest(Op.SET, (b"k",), (b"v" * 1000,)))
    wire.pass_time(10 * FRAME_SECONDS)  # an idle peer is not dropped
    wire.feed(1, request[:begun])
    wire.pass_time(0.9 * FRAME_SECONDS)
    wire.feed(1, request[begun : begun + 1])  # a peer that sends a byte now and then is dropped, too
    assert not wire.dropped
    wire.open(2)
    wire.feed(2, request[:begun])
    wire.pass_time(0.2 * FRAME_SECONDS)
    assert "did not complete a request" in wire.dropped[1]
    wire.feed(2, request[begun:])
    assert wire.answers(2) == ok()
    wire.pass_time(10 * FRAME_SECONDS)  # after a complete request it may be idle again
    assert wire.ask(2, Op.GET, b"k") == ok(b"v" * 1000)


def test_equal_requests_get_the_same_bytes() -> None:
    """They follow the openings at once."""
    server = StoreServer(b"", 1.0)
    for peer in range(101):
        request = (
            StoreRequest(Op.GET, (b"k",), timeout=9.0)
            if peer < 100
            else StoreRequest(Op.SET, (b"k",), (b"v",))
        )
        server.connect(peer, 0.0)
        server.receive(peer, hello() + encode_request(request), 0.0)
    answers = {peer: data for peer, data in server.outbox if peer < 100}
    assert parse_answers(answers[0]) == ok(b"v")
    assert len(answers) == 100
    assert len(set(map(id, answers.values()))) == 1


def test_waiting_for_several_keys() -> None:
    wire = Wire(1, 2)
    assert wire.ask(1, Op.GET, b"a", b"b", timeout=5) == []
    wire.ask(2, Op.SET, b"b", b"B")
    assert wire.answers(1) == []
    wire.ask(2, Op.APPEND, b"a", b"A")
    assert wire.answers(1) == ok(b"A", b"B")
    wire.pass_time(10)
    assert wire.answers(1) == []


def test_an_exchange_is_a_set_and_a_get_with_one_answer() -> None:
    wire = Wire(1, 2, 3)
    wire.ask(3, Op.GET, b"a")
    assert wire.ask(1, Op.EXCHANGE, b"a", b"b", b"A", b"", timeout=5) == []
    assert wire.answers(3) == ok(b"A")
    assert wire.ask(2, Op.EXCHANGE, b"b", b"a", b"B", b"") == ok(b"A")
    assert wire.answers(1) == ok(b"B")
    assert wire.ask(1, Op.EXCHANGE, b"a", b"c", b"again", b"", timeout=5) == []
    wire.pass_time(5)
    assert wire.answers(1) == [(ReplyStatus.TIMEOUT, [b"1", b"c"])]
    assert wire.ask(1, Op.GET, b"a") == ok(b"again")


def test_an_exchange_that_cannot_set_its_key_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "MAX_KEYS", 0)
    wire = Wire(1)
    ((status, (reason,)),) = wire.ask(1, Op.EXCHANGE, b"a", b"b", b"A", b"")
    assert status is ReplyStatus.REFUSED
    assert b"takes no more" in reason
    assert wire.server._parked == {}


def test_each_value_of_a_queue_goes_to_one_waiting_peer() -> None:
    wire = Wire(1, 2, 3)
    assert wire.ask(1, Op.POP, b"q") == wire.ask(2, Op.POP, b"q") == []
    items = [struct.pack("!4sI", b"\0ITM", 3) + value for value in (b"one", b"two")]
    wire.ask(3, Op.APPEND, b"q", b"".join(items))
    assert [wire.answers(peer) for peer in (1, 2)] == [ok(b"one"), ok(b"two")]


def test_a_key_deleted_meanwhile_is_waited_for_again() -> None:
    wire = Wire(1, 2)
    assert wire.ask(1, Op.WAIT, b"a", b"b", timeout=5) == []
    wire.ask(2, Op.SET, b"a", b"")
    wire.ask(2, Op.DELETE, b"a")
    wire.ask(2, Op.SET, b"b", b"")
    assert wire.answers(1) == []
    wire.pass_time(5)
    assert wire.answers(1) == [(ReplyStatus.TIMEOUT, [b"1", b"a"])]
    assert wire.ask(1, Op.CHECK, b"b") == ok(b"1")


def test_a_peer_that_disconnects_while_waiting_is_forgotten() -> None:
    wire = Wire(1, 2)
    wire.ask(1, Op.GET, b"a")
    wire.server.disconnect(1)
    assert wire.ask(2, Op.SET, b"a", b"") == ok()
    assert wire.server._parked == {}
    assert wire.server.next_deadline() is None


def test_obsolete_deadlines_do_not_accumulate() -> None:
    wire = Wire(1, 2)
    for number in range(1000):
        wire.now += 0.001
        key = b"%d" % number
        wire.ask(1, Op.GET, key, timeout=1e6)
        wire.ask(2, Op.SET, key, b"")
        assert wire.answers(1) == ok(b"")
    assert len(wire.server._deadlines) < 200


def test_a_refused_request_gets_the_reason_and_the_peer_continues() -> None:
    wire = Wire(1)
    wire.ask(1, Op.SET, b"k", b"word")
    ((status, (reason,)),) = wire.ask(1, Op.ADD, b"k", b"1")
    assert status is ReplyStatus.REFUSED
    assert b"'k' holds b'word'" in reason
    assert wire.ask(1, Op.NUM_KEYS) == ok(b"1")


def prove_as_client(wire: Wire, peer: int, secret: bytes) -> bytes:
    """Send a client's opening and proof; return the bytes after the server's opening and proof."""
    mine = hello(secret=True)
    wire.connect(peer, mine)
    answer = wire.take(peer)
    server, server_proof = answer[:OPENING_SIZE], answer[OPENING_SIZE:]
    assert server_proof == prove(SECRET, Role.ANSWERS, mine, server)
    wire.feed(peer, prove(secret, Role.DIALS, mine, server))
    return wire.take(peer)


def test_only_clients_with_the_secret_are_accepted() -> None:
    """test_opening.py has the proofs that a stranger can try."""
    wire = Wire(secret=SECRET)
    assert prove_as_client(wire, 1, SECRET) == b""
    assert wire.ask(1, Op.ADD, b"n", b"1") == ok(b"1")
    prove_as_client(wire, 2, b"another")
    wire.connect(3, hello(secret=True) + encode_request(StoreRequest(Op.SET, (b"k",), (b"v",))) + bytes(32))
    assert wire.dropped == dict.fromkeys((2, 3), "rank 1 does not prove that it belongs to the group")


def test_an_ended_opening_is_dropped_with_its_reason() -> None:
    wire = Wire(secret=SECRET)
    for peer, came, reason in (
        (1, b"", ""),  # a port scan
        (2, hello(secret=True)[:50], "before its opening was complete"),
        (3, hello(secret=True), "before it sent its proof"),
    ):
        wire.connect(peer, came)
        assert reason in wire.end(peer)
        assert bool(wire.dropped[peer]) == bool(reason)
        assert "secret" not in wire.dropped[peer]
    prove_as_client(wire, 4, SECRET)
    assert wire.end(4) == ""
    wire.connect(5, hello(secret=True))
    wire.feed(5, bytes(PROOF_SIZE))
    assert wire.dropped[5].startswith("it refused this side's proof: its secret differs; give every rank")


def test_the_oldest_opening_is_dropped() -> None:
    wire = Wire(secret=SECRET)
    prove_as_client(wire, 0, SECRET)
    for peer in range(1, MOST_OPENINGS + 1):
        wire.connect(peer)
    assert wire.dropped == {}
    wire.connect(MOST_OPENINGS + 1)
    assert wire.dropped == {1: f"one of more than {MOST_OPENINGS} openings"}
    assert wire.ask(0, Op.ADD, b"n", b"1") == ok(b"1")


def test_answered_clients_are_dropped_last() -> None:
    """Such a client regards its connection as established once it has sent its proof."""
    wire = Wire(secret=SECRET)
    mine = hello(secret=True)
    for peer in range(2 * MOST_OPENINGS):
        wire.connect(peer, mine if peer < 2 else b"")
    assert set(wire.dropped) == set(range(2, MOST_OPENINGS))
    wire.feed(0, prove(SECRET, Role.DIALS, mine, wire.take(0)[:OPENING_SIZE]))
    assert wire.ask(0, Op.ADD, b"n", b"1") == ok(b"1")
    for peer in range(2 * MOST_OPENINGS, 3 * MOST_OPENINGS):  # of those that never send a proof, too
        wire.connect(peer, mine)
    assert 1 in wire.dropped


def test_a_stopped_client_has_the_stores_timeout() -> None:
    """This is its limit for its proof, and for the rest of a request."""
    wire, mine = Wire(secret=SECRET, timeout=300.0), hello(secret=True)
    request = encode_request(StoreRequest(Op.SET, (b"k",), (b"v",)))
    prove_as_client(wire, 0, SECRET)
    wire.feed(0, request[:20])
    for peer in (1, 2):
        wire.connect(peer, mine)
    wire.pass_time(299.0)
    assert wire.dropped == {}
    wire.feed(0, request[20:])
    wire.feed(1, prove(SECRET, Role.DIALS, mine, wire.take(1)[:OPENING_SIZE]))
    wire.pass_time(2.0)
    assert wire.dropped == {2: "did not send its proof within 300 s"}
    assert wire.answers(0) == ok()
    assert wire.ask(1, Op.GET, b"k") == ok(b"v")


def test_strangers_are_dropped_when_no_descriptor_is_left() -> None:
    """Silent ones are dropped first; one without a proof only after OPENING_SECONDS, because it may be a rank."""
    wire = Wire(secret=SECRET, timeout=300.0)
    prove_as_client(wire, 0, SECRET)
    wire.connect(1, hello(secret=True))
    wire.connect(2)
    assert wire.server.give_way(wire.now)
    assert not wire.server.give_way(wire.now)
    wire.pass_time(OPENING_SECONDS)
    assert wire.server.give_way(wire.now)
    assert not wire.server.give_way(wire.now)
    wire.collect()
    assert list(wire.dropped) == [2, 1]
    assert wire.ask(0, Op.ADD, b"n", b"1") == ok(b"1")


def test_bytes_behind_the_proof_are_those_of_tls() -> None:
    server = StoreServer(SECRET, 1.0, encrypts=True)
    server.connect(1, 0.0)
    dialing = Dialing(Endpoint(bytes(GROUP_SIZE), 1, 2, SECRET, True, True), 0, ConnectionKind.STORE, 0)
    server.receive(1, dialing.opening, 0.0)
    ((_, answer),) = server.outbox
    dialing.take(answer[:OPENING_SIZE])
    server.receive(1, dialing.take(answer[OPENING_SIZE:]) + b"of TLS", 0.0)
    assert server.encrypting == [(1, dialing.seed, b"of TLS")]
    server.receive(1, encode_request(StoreRequest(Op.SET, (b"k",), (b"v",))), 0.0)  # decrypted
    assert parse_answers(server.outbox[-1][1]) == ok()


@pytest.mark.parametrize(
    ("server", "changes", "result"),
    [
        (SECRET, {}, OpeningResult.SECRET),
        (b"", {"has_secret": True}, OpeningResult.SECRET),
        (SECRET, {"has_secret": True, "encrypts": True}, OpeningResult.ENCRYPTION),
        (b"", {"protocol": 99}, OpeningResult.PROTOCOL),
        (b"", {"version": b"9.9"}, OpeningResult.WELCOME),  # the ranks compare versions when they join
    ],
)
def test_a_client_that_does_not_fit_gets_the_reason(
    server: bytes, changes: dict[str, Any], result: OpeningResult
) -> None:
    wire = Wire(secret=server)
    wire.connect(1, hello(**changes))
    assert Opening.from_bytes(wire.take(1), Role.ANSWERS).result is result
    assert (1 in wire.dropped) == (result is not OpeningResult.WELCOME)


@pytest.mark.parametrize(
    "changes",
    [{"kind": ConnectionKind.DATA}, {"peer": 1}, {"size": 3}, {"rank": 0}],
)
def test_an_opening_for_another_server_is_dropped(changes: dict[str, int]) -> None:
    wire = Wire()
    wire.connect(1, hello(**changes))
    assert "does not have" in wire.dropped[1]
    assert wire.take(1) == b""


def test_a_will_is_executed_when_its_connection_ends() -> None:
    wire = Wire(1, 2, 3, 4)
    assert wire.ask(1, Op.GET, b"k", timeout=99) == []
    for peer, value in ((2, b"two"), (3, b"three"), (4, b"four")):
        assert wire.ask(peer, Op.WILL, b"k", value) == ok()
    assert wire.ask(4, Op.WILL) == ok()
    wire.server.disconnect(4)  # withdrew it
    assert wire.answers(1) == []
    wire.server.disconnect(3)
    wire.collect()
    assert wire.answers(1) == ok(b"three")
    wire.server.disconnect(2)  # the first value stays
    assert wire.ask(1, Op.GET, b"k") == ok(b"three")
