"""The opening of a connection: accepted for every split of the bytes, and every wrong one refused by a side."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcoll.store.opening import (
    OPENING_SIZE,
    PROOF_SIZE,
    PROTOCOL,
    SEED_SIZE,
    Answering,
    ConnectionKind,
    Dialing,
    Endpoint,
    Opening,
    OpeningError,
    OpeningResult,
    RefusedError,
    Role,
    Turned,
    derive_key,
)

GROUP = b"g" * 16
KEY = derive_key(b"secret", b"t" * 16)
SEATS = {rank: Endpoint(GROUP, rank, 4, KEY, True) for rank in range(4)}


def find(theirs: Opening) -> Endpoint | None:
    return SEATS.get(theirs.peer) if theirs.group == GROUP else None


def dialing(**changes: object) -> Dialing:
    return Dialing(dataclasses.replace(SEATS[1], **changes), 2, ConnectionKind.DATA, 3)  # type: ignore[arg-type]


def feed(side: Dialing | Answering, data: bytes, cuts: Sequence[int] = ()) -> bytes:
    """Pass all of `data` to a side, in random pieces of at most what it wants; return its answers."""
    answer = b""
    for cut in [*cuts, *[len(data)] * 3]:
        piece, data = data[: min(cut, side.wants)], data[min(cut, side.wants) :]
        if piece:
            answer += side.take(piece)
    assert data == b"", "the side wants less than the other sends"
    return answer


def shake(
    caller: Dialing,
    answerer: Answering,
    cuts: Sequence[int] = (),
    change: Callable[[int, bytes], bytes] = lambda step, data: data,
) -> None:
    """Run a complete opening; `change` may alter the bytes between the two sides."""
    reply = feed(answerer, change(0, caller.opening), cuts)
    proof = feed(caller, change(1, reply), cuts)
    feed(answerer, change(2, proof), cuts)


@given(st.lists(st.integers(1, OPENING_SIZE + PROOF_SIZE), max_size=200))
def test_both_sides_finish_for_every_split_of_the_bytes(cuts: list[int]) -> None:
    caller, answerer = dialing(), Answering(find)
    shake(caller, answerer, cuts)
    assert (caller.wants, answerer.wants) == (0, 0)
    assert answerer.theirs is not None
    theirs = answerer.theirs
    assert (theirs.rank, theirs.peer, theirs.kind, theirs.stream) == (1, 2, ConnectionKind.DATA, 3)


@given(st.integers(0, 2), st.integers(0, OPENING_SIZE + PROOF_SIZE - 1), st.integers(1, 255))
def test_any_changed_byte_is_detected(step: int, place: int, mask: int) -> None:
    def change(now: int, data: bytes) -> bytes:
        if now != step:
            return data
        at = place % len(data)
        return data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :]

    with pytest.raises(OpeningError):
        shake(dialing(), Answering(find), change=change)


@given(st.binary(min_size=OPENING_SIZE - 8, max_size=OPENING_SIZE - 8), st.sampled_from(Role))
def test_random_bytes_after_the_magic_are_parsed_or_refused(data: bytes, role: Role) -> None:
    for mine in Role:
        try:
            found = Opening.from_bytes(b"FASTMESH" + data, mine)
        except OpeningError:
            continue
        assert found.protocol != PROTOCOL or (found.rank < found.size and found.peer < found.size)


@pytest.mark.parametrize("key", [derive_key(b"other", b"t" * 16), derive_key(b"secret", b"u" * 16)])
def test_the_dialing_side_detects_another_secret_or_token(key: bytes) -> None:
    caller, answerer = dialing(key=key), Answering(find)
    with pytest.raises(RefusedError, match="FASTCOLL_SECRET") as refused:
        feed(caller, feed(answerer, caller.opening))
    with pytest.raises(OpeningError, match="refused this side's proof: its secret differs"):
        answerer.take(refused.value.answer)


@pytest.mark.parametrize("has_secret", [False, True])
def test_a_secret_on_one_side_only_is_refused(has_secret: bool) -> None:
    answerer = Answering(lambda theirs: dataclasses.replace(SEATS[theirs.peer], has_secret=not has_secret))
    caller = dialing(has_secret=has_secret)
    with pytest.raises(Turned) as turned:
        answerer.take(caller.opening)
    with pytest.raises(RefusedError, match="FASTCOLL_SECRET"):
        caller.take(turned.value.answer)


@pytest.mark.parametrize("encrypts", [False, True])
def test_encryption_on_one_side_only_is_refused(encrypts: bool) -> None:
    answerer = Answering(lambda theirs: dataclasses.replace(SEATS[theirs.peer], encrypts=not encrypts))
    caller = dialing(encrypts=encrypts)
    theirs, mine = ("it", "this process") if encrypts else ("this process", "it")
    with pytest.raises(Turned, match=f"{theirs} encrypts its connections, .*FASTCOLL_ENCRYPT") as turned:
        answerer.take(caller.opening)
    with pytest.raises(RefusedError, match=f"{mine} encrypts its connections, .*FASTCOLL_ENCRYPT"):
        caller.take(turned.value.answer)


def test_both_sides_derive_a_new_seed_for_each_connection() -> None:
    def seed(encrypts: bool) -> bytes:
        caller = dialing(encrypts=encrypts)
        answerer = Answering(lambda theirs: dataclasses.replace(SEATS[theirs.peer], encrypts=encrypts))
        shake(caller, answerer)
        assert caller.seed == answerer.seed
        return caller.seed

    seeds = [seed(True) for _ in range(3)]
    assert {len(each) for each in seeds} == {SEED_SIZE}
    assert len({*seeds}) == 3
    assert seed(False) == b""


@pytest.mark.parametrize(("field", "value", "result"), [(8, b"\0\7", "PROTOCOL"), (12, b"9.9.9", "VERSION")])
def test_another_version_gets_the_reason(field: int, value: bytes, result: str) -> None:
    caller = dialing()
    opening = caller.opening[:field] + value + caller.opening[field + len(value) :]
    with pytest.raises(Turned) as turned:
        Answering(find).take(opening)
    assert Opening.from_bytes(turned.value.answer, Role.ANSWERS).result is OpeningResult[result]


def test_the_dialing_side_names_both_versions() -> None:
    caller = dialing()
    answer = Opening.from_bytes(caller.opening, Role.DIALS).answer(SEATS[2], OpeningResult.VERSION)
    with pytest.raises(RefusedError, match=r"fastcoll 9\.9\.9 .* this rank"):
        caller.take(answer._replace(version=b"9.9.9").to_bytes())


def test_reflected_openings_and_reflected_or_invented_proofs_are_refused() -> None:
    caller = dialing()
    with pytest.raises(OpeningError, match="not the opening of a side that answers"):
        caller.take(caller.opening)
    for proof_of in (lambda reply: reply[OPENING_SIZE:], lambda reply: b"x" * PROOF_SIZE):
        answerer = Answering(find)
        reply = answerer.take(dialing().opening)
        assert answerer.wants == PROOF_SIZE
        with pytest.raises(OpeningError, match="does not prove"):
            answerer.take(proof_of(reply))


def test_recorded_openings_and_proofs_are_refused_later() -> None:
    recorded: list[bytes] = []

    def record(step: int, data: bytes) -> bytes:
        recorded.append(data)
        return data

    shake(dialing(), Answering(find), change=record)
    again = Answering(find)
    again.take(recorded[0])
    with pytest.raises(OpeningError, match="does not prove"):
        again.take(recorded[2])
    with pytest.raises(RefusedError):
        feed(dialing(), recorded[1])


@pytest.mark.parametrize("changes", [{"group": b"h" * 16}, {"size": 5}, {"rank": 2}])
def test_an_opening_for_an_unknown_endpoint_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(OpeningError, match="does not have"):
        Answering(find).take(dialing(**changes).opening)


def test_another_rank_at_the_address_is_a_retry() -> None:
    caller = dialing()
    other = Opening.from_bytes(caller.opening, Role.DIALS).answer(SEATS[3], OpeningResult.WELCOME)
    with pytest.raises(OpeningError, match="taken over") as raised:
        caller.take(other.to_bytes())
    assert not isinstance(raised.value, RefusedError)  # the caller may retry
