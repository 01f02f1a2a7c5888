from __future__ import annotations

import pytest

from fastcoll.errors import UsageError
from fastcoll.rendezvous.init_method import parse


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [
        ("tcp://10.1.1.20:23456", "10.1.1.20", 23456),
        ("tcp://localhost:0", "localhost", 0),
        ("tcp://[::1]:123", "::1", 123),
        ("tcp://239.1.2.3:5", "239.1.2.3", 5),
        ("tcp://238-node:5", "238-node", 5),
        ("tcp://[ff15:1e18:5d4c:4cf0:d02d:b659:53ba:b0a7]:5", "ff15:1e18:5d4c:4cf0:d02d:b659:53ba:b0a7", 5),
    ],
)
def test_tcp(url: str, host: str, port: int) -> None:
    method = parse(url, -1, 4)
    assert (method.scheme, method.host, method.port) == ("tcp", host, port)
    assert (method.rank, method.world_size) == (None, 4)
    assert method.is_multicast is host.startswith(("ff", "239."))


def test_the_query_and_the_arguments() -> None:
    assert parse("tcp://h:1?rank=0&world_size=4", -1, -1).rank == 0
    method = parse("tcp://h:1?rank=3&world_size=4", 3, 4)
    assert (method.rank, method.world_size) == (3, 4)
    assert parse("env://?world_size=2", 1, -1).world_size == 2
    assert parse("file:///tmp/x%20y?rank=1", -1, 2).path == "/tmp/x y"


@pytest.mark.parametrize(
    ("url", "rank", "world_size", "message"),
    [
        ("udp://h:1", 0, 1, "no known scheme; there are env://, tcp://, file://"),
        ("h:1", 0, 1, "no known scheme"),
        ("", 0, 1, "no known scheme"),
        ("tcp:h:1", 0, 1, "no known scheme"),
        ("tcp://h", 0, 1, "needs a host and a port"),
        ("tcp://:5", 0, 1, "needs a host and a port"),
        ("tcp://h:x", 0, 1, "cannot be read"),
        ("tcp://h:99999", 0, 1, "cannot be read"),
        ("tcp://[::1:5", 0, 1, "cannot be read"),
        ("tcp://h:1?rank=1", 0, 2, r"rank=0 was passed, but .* has rank=1"),
        ("tcp://h:1?world_size=3", 0, 2, "world_size=2 was passed"),
        ("tcp://h:1?rank=-1", -1, 2, "rank must be a whole number"),
        ("tcp://h:1?size=2", 0, 2, "unknown query 'size'"),
        (f"tcp://h:1?world_size={'1' * 5000}", 0, -1, "world_size must be a whole number"),
        ("tcp://h:1", 2, 2, "rank 2 is not in a world of 2"),
        ("tcp://h:1", -2, 2, "rank -2 is not in a world"),
        ("tcp://h:1", 0, 0, "world_size must be 1 or more, got 0"),
        ("tcp://h:1", -1, -5, "world_size must be 1 or more"),
        ("file://tmp/x", 0, 1, "a path begins with file:///"),
        ("file://", 0, 1, "absolute path"),
        ("file:///tmp/", 0, 1, "absolute path"),
    ],
)
def test_wrong_urls(url: str, rank: int, world_size: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse(url, rank, world_size)
