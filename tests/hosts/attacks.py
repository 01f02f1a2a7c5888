"""Attacks of a stranger that reaches a job's ports: a program that runs on a host and prints the outcomes.

    python attacks.py record FILE               record others' openings and proofs, until FILE.stop exists
    python attacks.py attack FILE PORT ...      every attack on every PORT, as in 10.77.0.1:24500, with the record FILE
    python attacks.py crawl COUNT PORT ...      COUNT connections that send a byte a second, until they are dropped

The attacker has the protocol (by import) and a record of the network from the beginning, but no secret.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import selectors
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fastcoll.store.frames import encode_request
from fastcoll.store.opening import (
    MAGIC,
    OPENING_SIZE,
    PROOF_SIZE,
    ConnectionKind,
    Endpoint,
    Opening,
    OpeningResult,
    Role,
    derive_key,
    prove,
)
from fastcoll.store.table import Op, StoreRequest

WHOLE = OPENING_SIZE + PROOF_SIZE
_PATIENCE = 100.0  # for a drop: longer than any opening may take, on a busy machine
_ETH_P_ALL, _SO_RCVBUFFORCE = 3, 33
_TLS_HELLO = bytes.fromhex("16030100c8010000c40303") + bytes(199)

_REQUEST = encode_request(StoreRequest(Op.NUM_KEYS))
Talk = tuple[bytes, Callable[[bytes], bytes] | None]
"""What is sent first, and what is made of the answer and sent then."""


# ---- to record ---------------------------------------------------------------------------------------------


def record(file: str) -> None:
    """Write the first 144 bytes of each side of every connection of fastcoll to a file: `[sender, hex]`."""
    packets = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(_ETH_P_ALL))
    packets.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 64 << 20)
    packets.settimeout(0.05)
    heard: dict[tuple[bytes, bytes], tuple[int, bytearray]] = {}
    Path(f"{file}.begun").touch()
    while not os.path.exists(f"{file}.stop"):
        with contextlib.suppress(TimeoutError):
            _hear(heard, packets.recv(1 << 16))
    whole = [(_port_of(ends), data.hex()) for (_, ends), (_, data) in heard.items() if len(data) == WHOLE]
    Path(file).write_text(json.dumps(whole))


def _hear(heard: dict[tuple[bytes, bytes], tuple[int, bytearray]], packet: bytes) -> None:
    if packet[0] >> 4 != 4 or packet[9] != socket.IPPROTO_TCP:
        return
    start = 4 * (packet[0] & 15)
    addresses, ends, sequence = packet[12:20], packet[start : start + 4], packet[start + 4 : start + 8]
    payload = packet[start + 4 * (packet[start + 12] >> 4) : struct.unpack_from("!H", packet, 2)[0]]
    at = struct.unpack("!I", sequence)[0]
    first, data = heard.setdefault((addresses, ends), (at, bytearray()))
    if payload and (data or payload.startswith(MAGIC)):
        if not data:
            heard[addresses, ends] = first, data = at, bytearray()
        if (at - first) % (1 << 32) == len(data):  # loopback shows each packet twice
            data += payload[: WHOLE - len(data)]


def _port_of(ends: bytes) -> list[int]:
    return list(struct.unpack("!HH", ends))


# ---- to attack ---------------------------------------------------------------------------------------------


def _opening(kind: ConnectionKind, group: bytes, key: bytes, has_secret: bool) -> Talk:
    """Return rank 1's valid opening, the proof made with `key`, and a request that a store would answer."""
    endpoint = Endpoint(group, 1, 2, key, has_secret)
    mine = Opening.of(endpoint, Role.DIALS, kind, 0, 0, OpeningResult.WELCOME).to_bytes()
    return mine, lambda answer: prove(key, Role.DIALS, mine, answer[:OPENING_SIZE]) + _REQUEST


def attacks(recorded: list[tuple[list[int], str]]) -> Iterator[tuple[str, Talk]]:
    """Return every attack by its name; recorded bytes are tried at every port, not only at their own."""
    noise = random.Random(1)
    yield "nothing", (b"", lambda answer: b"")
    yield "a million bytes", (noise.randbytes(1_000_000), None)
    yield "a million bytes behind the magic", (MAGIC + noise.randbytes(1_000_000), None)
    yield "http", (b"GET / HTTP/1.1\r\nHost: store\r\n\r\n", None)
    yield "tls", (_TLS_HELLO, None)
    for length in (1 << 31, 1 << 63, (1 << 64) - 1):
        yield f"length {length}", (struct.pack("!Q", length) + bytes(200), None)
        yield f"length {length} behind the magic", (MAGIC + struct.pack("!Q", length) * 13, None)
    yield "a request", (_REQUEST, None)
    openings = [bytes.fromhex(text) for _, text in recorded]
    dialed = [each for each in openings if each[10] == Role.DIALS]
    answered = [each for each in openings if each[10] == Role.ANSWERS]
    groups = {bytes(16), *(each[32:48] for each in openings)}
    for kind in ConnectionKind:
        for group in groups:
            for name, secret in (("wrong", b"wrong"), ("empty", b"")):
                # A store's key is the secret; a group's key is derived from a token, which a stranger does not have.
                for key in (secret, derive_key(secret, bytes(16))):
                    yield f"{name} secret, {kind.name}", _opening(kind, group, key, has_secret=True)
            yield f"no secret, {kind.name}", _opening(kind, group, b"", has_secret=False)
    for each in dialed:
        theirs, old = each[:OPENING_SIZE], each[OPENING_SIZE:]
        opening = Opening.from_bytes(theirs, Role.DIALS)
        yield "replayed", (each, None)
        yield "replayed, in turn", (theirs, lambda _, old=old: old)
        yield "its own proof reflected", (theirs, lambda answer: answer[OPENING_SIZE:WHOLE])
        yield "another nonce", (opening._replace(nonce=os.urandom(32)).to_bytes(), lambda _, old=old: old)
        other = opening._replace(rank=opening.peer, peer=opening.rank)
        yield "for another rank", (other.to_bytes(), lambda _, old=old: old)
        yield "as another role", (theirs[:10] + bytes([Role.ANSWERS]) + theirs[11:], None)
        for kind in ConnectionKind:
            yield f"for {kind.name}", (opening._replace(kind=kind).to_bytes(), lambda _, old=old: old)
    for each in answered:
        yield "an answer reflected", (each, None)
        yield "an answer as an opening", (each[:10] + bytes([Role.DIALS]) + each[11:], None)


def _connected(where: str) -> socket.socket:
    host, _, port = where.rpartition(":")
    return socket.create_connection((host, int(port)), _PATIENCE)


def attack(where: str, name: str, talk: Talk) -> dict[str, Any]:
    """Run one attack; return the bytes that the other side sends until it drops the connection, and the time."""
    since, answer, has_sent = time.monotonic(), b"", False
    first, then = talk
    with _connected(where) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(first)
        if not first:
            connection.shutdown(socket.SHUT_WR)
        while data := connection.recv(1 << 16):
            answer += data
            if then is not None and not has_sent and len(answer) >= OPENING_SIZE:
                has_sent = True
                connection.sendall(then(answer))
    return {"where": where, "name": name, "answer": answer.hex(), "seconds": time.monotonic() - since}


# ---- to crawl ----------------------------------------------------------------------------------------------


def crawl(count: int, where: list[str]) -> dict[str, float]:
    """Send a byte a second on `count` connections to each port; return the longest time until one is dropped."""
    opening = _opening(ConnectionKind.STORE, bytes(16), b"wrong", has_secret=True)[0]
    waiting, since = selectors.DefaultSelector(), time.monotonic()
    for each in where:
        for _ in range(count):
            waiting.register(_connected(each), selectors.EVENT_READ, each)
    print("crawling", flush=True)
    held = dict.fromkeys(where, 0.0)
    for number in range(int(_PATIENCE)):
        for key in list(waiting.get_map().values()):
            with contextlib.suppress(ConnectionError):
                key.fileobj.send(opening[number : number + 1])  # type: ignore[union-attr]
        until = time.monotonic() + 1.0
        while waiting.get_map() and (left := until - time.monotonic()) > 0:
            for key, _ in waiting.select(left):
                waiting.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
                held[key.data] = time.monotonic() - since
        if not waiting.get_map():
            return held
    return dict.fromkeys(where, float("inf"))


def main(what: str, *words: str) -> None:
    """See the top of the file."""
    if what == "record":
        record(words[0])
    elif what == "attack":
        recorded = json.loads(Path(words[0]).read_text())
        made = [attack(where, *each) for where in words[1:] for each in attacks(recorded)]
        print(json.dumps(made))
    else:
        print(json.dumps(crawl(int(words[0]), list(words[1:]))))


if __name__ == "__main__":
    main(*sys.argv[1:])
