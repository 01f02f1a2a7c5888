"""The arena: blocks against a model, peers' mappings, threads, forks, a full /dev/shm, the end of the interpreter."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from together import together

from fastcoll.arrays import numpy_memory
from fastcoll.errors import ResourceError
from fastcoll.kernels import allocator as a
from fastcoll.shm import arena
from fastcoll.testing.worker import shm_names

INT = ctypes.c_int64
STATE = arena.STATE_ADDRESS
KIB = 1 << 10


class Functions:
    """The allocator's C functions, called with the GIL, as NumPy does, or without."""

    def __init__(self, kind: Any = ctypes.PYFUNCTYPE) -> None:
        arena.create()
        made = a.functions()
        self.malloc = kind(INT, INT, INT)(made.malloc)
        self.calloc = kind(INT, INT, INT, INT)(made.calloc)
        self.realloc = kind(INT, INT, INT, INT)(made.realloc)
        self.free = kind(None, INT, INT, INT)(made.free)
        self.hold = kind(INT, INT, INT)(made.hold)


@pytest.fixture(scope="module")
def c() -> Functions:
    return Functions()


def word(index: int) -> int:
    return INT.from_address(STATE + 8 * index).value


def set_word(index: int, value: int) -> None:
    INT.from_address(STATE + 8 * index).value = value


@pytest.fixture
def handler(c: Functions) -> Iterator[None]:
    """NumPy allocates this thread's arrays in the arena."""
    before = numpy_memory.set_handler(numpy_memory.capsule_of(b"a test", STATE, a.functions()[:4]))
    yield
    numpy_memory.set_handler(before)


@contextmanager
def changed(index: int, value: int) -> Iterator[None]:
    """In this block a word of the allocator's state has another value."""
    before = word(index)
    set_word(index, value)
    try:
        yield
    finally:
        set_word(index, before)


@pytest.fixture
def nothing_left(c: Functions) -> Iterator[None]:
    """Check the tables before and after a test, which must free all that it allocates."""
    check_tables()
    start = word(a.IN_USE)
    yield
    check_tables()
    assert word(a.IN_USE) == start


def is_inside(address: int) -> bool:
    return 0 <= address - word(a.BASE) < word(a.RANGE)


def bytes_at(address: int, nbytes: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def check_tables() -> dict[int, tuple[int, int]]:
    """Check that blocks are adjacent, counted and listed correctly, and that adjacent free blocks are merged."""
    count = word(a.RANGE) // a.PAGE
    pages = np.ctypeslib.as_array((INT * count).from_address(word(a.PAGES)))
    blocks, page, before = {}, 1, a.USED
    while page < count:
        length, kind = divmod(int(pages[page]), a.KINDS)
        assert length >= a.SMALLEST // a.PAGE
        assert pages[page + length - 1] == pages[page]
        if kind != a.USED and before != a.USED:
            assert (kind == a.HOLE) != (before == a.HOLE), "two blocks that should be one"
        blocks[page] = length, kind
        page, before = page + length, kind
    assert page == count
    assert word(a.IN_USE) == sum(length for length, kind in blocks.values() if kind == a.USED)
    idle = [length for length, kind in blocks.values() if kind in (a.DIRTY, a.CLEAN)]
    assert word(a.IDLE) == sum(idle)
    listed = []
    for k in range(2 * a._SIZES):
        page = word(a._LISTS + k)
        while page:
            assert (blocks[page][1] == a.HOLE) == (k >= a._SIZES)
            listed.append(page)
            page = int(pages[page + 1])
    assert sorted(listed) == [page for page, (_, kind) in blocks.items() if kind != a.USED]
    return blocks


@pytest.mark.long
@pytest.mark.parametrize("keep", [0, 1 << 20, 1 << 30])
def test_blocks_against_a_model(c: Functions, keep: int, nothing_left: None) -> None:
    """Allocate, grow and free at random: blocks do not overlap, content stays, and calloc returns zeros."""
    dice, blocks = random.Random(keep), dict[int, tuple[int, int]]()
    most_idle = max(keep, 8 << 20, word(a.IDLE) * a.PAGE)  # blocks of earlier tests may be idle

    def size() -> int:
        return int(2 ** dice.uniform(10, 22)) + dice.choice((-1, 0, 1))

    def look(address: int, nbytes: int, mark: int) -> None:
        content = bytes_at(address, nbytes)
        assert content[0] == content[-1] == content[nbytes // 2] == mark

    def enter(address: int, nbytes: int) -> None:
        assert is_inside(address) == (nbytes >= a.SMALLEST)
        mark = dice.randrange(1, 256)
        bytes_at(address, nbytes)[:] = mark
        blocks[address] = nbytes, mark

    with changed(a.KEEP, keep // a.PAGE):
        for step in range(600):
            turn, nbytes = dice.random(), size()
            if turn < 0.3 or not blocks:
                enter(c.malloc(STATE, nbytes), nbytes)
            elif turn < 0.45:
                nbytes -= nbytes % 8
                address = c.calloc(STATE, nbytes // 8, 8)
                assert not bytes_at(address, nbytes).any()
                enter(address, nbytes)
            else:
                address = dice.choice(list(blocks))
                old, mark = blocks.pop(address)
                if turn < 0.55:
                    was_inside, address = is_inside(address), c.realloc(STATE, address, nbytes)
                    look(address, min(old, nbytes), mark)
                    if was_inside and nbytes >= a.SMALLEST:
                        enter(address, nbytes)
                        continue
                else:
                    look(address, old, mark)
                c.free(STATE, address, nbytes)
            if step % 100 == 0:
                check_tables()
                for address, (nbytes, mark) in blocks.items():
                    look(address, nbytes, mark)
                assert word(a.IDLE) <= most_idle // a.PAGE
        for address, (nbytes, _) in blocks.items():
            c.free(STATE, address, nbytes)


def test_blocks_of_a_class_have_room_for_sizes_rounded_up_to_it() -> None:
    round_up, size_class = a._round_up.py_func, a._size_class.py_func
    for count in (*range(1, 3000), (1 << 20) + 1, (1 << 28) - 1, (1 << 33) - 1):
        rounded = round_up(count)
        assert count <= rounded <= max(16, count * 9 // 8 + 1)
        assert round_up(rounded) == rounded
        # No block in the list of this class is smaller.
        assert rounded == 16 or size_class(rounded) == size_class(rounded - 1) + 1
        assert 0 <= size_class(rounded) < a._SIZES


def test_threads_allocate_and_free_concurrently(c: Functions, nothing_left: None) -> None:
    without = Functions(ctypes.CFUNCTYPE)
    refuse = ctypes.CFUNCTYPE(INT, INT, INT)(lambda context, nbytes: 0)  # NumPy's own function needs the GIL

    def work(mark: int) -> None:
        dice = random.Random(mark)
        for _ in range(300):
            made = []
            for _ in range(4):
                nbytes = dice.randrange(64 * KIB, 512 * KIB)
                if address := without.malloc(STATE, nbytes):  # 0: another thread held the lock for long
                    made.append((address, nbytes))
                    bytes_at(address, nbytes)[:] = mark
            for address, nbytes in made:
                assert (bytes_at(address, nbytes) == mark).all(), "another thread got the same block"
                without.free(STATE, address, nbytes)

    with changed(a.BEFORE, ctypes.cast(refuse, ctypes.c_void_p).value or 0):
        assert together(*[partial(work, mark) for mark in range(1, 5)]) == [None] * 4
    c.hold(STATE, 1)  # frees the deferred blocks
    c.hold(STATE, 0)


def test_no_thread_waits_for_a_lock_that_is_held_for_long(c: Functions, nothing_left: None) -> None:
    first, second = (c.malloc(STATE, 100 * KIB) for _ in range(2))
    used = word(a.IN_USE)
    assert c.hold(STATE, 1) == 1
    outside = c.malloc(STATE, 100 * KIB)
    assert not is_inside(outside)
    for address in (outside, first, second):
        c.free(STATE, address, 100 * KIB)
    assert word(a.IN_USE) == used
    c.hold(STATE, 0)
    third = c.malloc(STATE, 100 * KIB)  # the next thread with the lock frees them
    assert is_inside(third)
    c.free(STATE, third, 100 * KIB)


PEER = """
import sys, numpy as np
from fastcoll.shm import arena
pid, fd, nonce, nbytes, *places = map(int, sys.argv[1:])
with arena.map_peer(pid, fd, nonce, nbytes) as mapping:
    print("mapped", flush=True)
    while line := sys.stdin.readline():
        place, count = map(int, line.split())
        x = np.ctypeslib.as_array((arena.ctypes.c_double * count).from_address(mapping.address + place))
        print(x.sum(), flush=True)
        x[:] = -1
        print("written", flush=True)
"""


@contextmanager
def peer_that_writes() -> Iterator[Callable[[np.ndarray], float]]:
    """Start a process that maps this arena; the function has it fill an array with -1 and returns the sum before."""
    values = map(str, (os.getpid(), word(a.FD), word(a.NONCE), word(a.LIMIT)))
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", PEER, *values]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as peer:
        assert peer.stdin
        assert peer.stdout
        assert peer.stdout.readline() == "mapped\n"

        def fill(x: np.ndarray) -> float:
            print(x.ctypes.data - word(a.BASE), x.size, file=peer.stdin, flush=True)
            total = float(peer.stdout.readline())
            assert peer.stdout.readline() == "written\n"
            return total

        yield fill
        peer.stdin.close()
    assert peer.returncode == 0


def test_a_peer_reads_and_writes_arrays_made_before_and_after_it_has_mapped_the_arena(handler: None) -> None:
    before = np.full(100_000, 0.5)
    with peer_that_writes() as fill:
        after = np.full(3_000_000, 2.0) + 1  # more than one step, so the arena has grown
        for x, total in ((before, 50_000), (after, 9_000_000), (after[5:105], -100)):
            assert arena.is_shared(x)
            assert fill(x) == total
            assert (x == -1).all()


@pytest.mark.long
@pytest.mark.ranks(1, init=False, fresh=True)  # afterwards this process shares no arrays
def test_a_withdrawn_array_keeps_its_content_and_gets_no_writes_of_peers(rank: int, handler: None) -> None:
    x = np.arange(100_000.0)
    with peer_that_writes() as fill:
        arena.withdraw(x.ctypes.data, x.nbytes)
        assert (x == np.arange(100_000.0)).all()
        assert fill(x) == x.sum()
        assert (x == np.arange(100_000.0)).all()


def test_another_arena_is_not_mistaken_for_this_one(c: Functions) -> None:
    fd, nonce, limit = word(a.FD), word(a.NONCE), word(a.LIMIT)
    read, write = os.pipe()
    for wrong, why in (
        ((fd, nonce + 1, limit), "is something else"),
        ((fd, nonce, limit + a.PAGE), "is something else"),
        ((99_999_999, nonce, limit), "No such file"),
        ((read, nonce, limit), "cannot map the shared arrays of process"),
    ):
        with pytest.raises(ResourceError, match=why):
            arena.map_peer(os.getpid(), *wrong)
    os.close(read)
    os.close(write)
    mapping = arena.map_peer(os.getpid(), fd, nonce, limit)
    mapping.close()
    mapping.close()


def test_it_has_no_name_and_its_owner_alone_may_open_it(c: Functions) -> None:
    path = f"/proc/self/fd/{word(a.FD)}"
    assert os.readlink(path).endswith(" (deleted)")
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert not os.get_inheritable(word(a.FD))
    assert not list(Path("/dev/shm").glob(f"fastcoll-{os.getuid()}-*-{os.getpid()}-*"))


def test_numpy_makes_large_arrays_in_it_and_small_ones_elsewhere(handler: None) -> None:
    x = np.arange(100_000.0)
    for shared in (x, x + 1, np.zeros((300, 300)), x.reshape(10, -1)[2:5], x.copy(), np.sort(x)[::-1]):
        assert arena.is_shared(shared)
    for ordinary in (np.zeros(8_000), x[:10].copy(), np.frombuffer(bytearray(1 << 20))):
        assert not arena.is_shared(ordinary)
    x.resize(300_000, refcheck=False)
    assert arena.is_shared(x)
    assert x[99_999] == 99_999
    assert not x[100_000:].any()
    x.resize(100, refcheck=False)
    assert not arena.is_shared(x)
    np.testing.assert_array_equal(x, np.arange(100.0))


def test_arrays_are_freed_by_any_thread_and_without_the_handler(nothing_left: None) -> None:
    before = numpy_memory.set_handler(numpy_memory.capsule_of(b"a test", STATE, a.functions()[:4]))
    held = [np.ones(100_000) for _ in range(10)]
    numpy_memory.set_handler(before)
    assert all(map(arena.is_shared, held))
    del held[:5]
    assert together(held.clear) == [None]


def test_pages_are_released(handler: None) -> None:
    def taken() -> int:
        return os.stat(f"/proc/self/fd/{word(a.FD)}").st_blocks * 512

    with changed(a.KEEP, (16 << 20) // a.PAGE):
        start = taken()
        x = np.ones(8 << 20)
        assert taken() >= start + x.nbytes - word(a.KEEP) * a.PAGE
        del x
        assert taken() <= start + (16 << 20)


def test_with_a_full_file_system_arrays_are_in_ordinary_memory(
    handler: None, caplog: pytest.LogCaptureFixture
) -> None:
    refused = arena.refused()
    set_word(a.REPORTED, 0)
    with changed(a.RESERVE, 1 << 60):
        x, y = np.ones(64 << 20, np.uint8), np.zeros(64 << 20, np.uint8)
    assert not arena.is_shared(x)
    assert not arena.is_shared(y)
    assert arena.refused() == refused + 2
    assert x.all()
    assert not y.any()
    assert sum("ordinary memory" in record.message for record in caplog.records) == 1
    assert arena.is_shared(np.ones(64 << 20, np.uint8))
    check_tables()


@pytest.mark.parametrize("has_room", [True, False])
def test_a_forked_child_has_memory_of_its_own(
    handler: None, has_room: bool, caplog: pytest.LogCaptureFixture
) -> None:
    x, y = np.full(100_000, 1.0), np.full(500_000, 2.0)
    reserve, nonce = word(a.RESERVE), word(a.NONCE)
    if not has_room:
        set_word(a.RESERVE, 1 << 60)
    to_child, from_child = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            set_word(a.RESERVE, reserve)
            x[:10] = 5  # before the parent writes; the page is the child's from now on
            os.write(from_child[1], b"1")
            os.read(to_child[0], 1)
            assert (x[:10] == 5).all()
            assert (x[-10:] == 1).all() or not has_room  # the parent has written 7 there
            z = x * 0 + y[:100_000]
            assert arena.is_shared(z) == arena.is_shared(x) == has_room
            check_tables()
            grandchild = os.fork()
            if grandchild == 0:
                y[:] = 3
                os._exit(0 if arena.is_shared(y) == has_room and (x[:10] == 5).all() else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]) == 0
            assert (y == 2).all()
            del x, z
            y.resize(10, refcheck=False)
            check_tables()
            if has_room:
                assert word(a.NONCE) not in (0, nonce)
                arena.map_peer(os.getpid(), word(a.FD), word(a.NONCE), word(a.LIMIT)).close()
            status = 0
        finally:
            os.write(from_child[1], b"1")
            os._exit(status)
    set_word(a.RESERVE, reserve)
    os.read(from_child[0], 1)
    assert (x == 1).all()
    x[:] = 7
    os.write(to_child[1], b"1")
    os.read(from_child[0], 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (x == 7).all()
    assert (y == 2).all()
    assert word(a.NONCE) == nonce
    check_tables()
    assert (len(caplog.records) == 0) == has_room
    for descriptor in (*to_child, *from_child):
        os.close(descriptor)


AT_THE_END = """
import numpy as np, sys
from fastcoll.arrays import numpy_memory
from fastcoll.kernels import allocator
from fastcoll.shm import arena
arena.create()
numpy_memory.set_handler(numpy_memory.capsule_of(b"x", arena.STATE_ADDRESS, allocator.functions()[:4]))
class Late:
    def __init__(self): self.x = np.ones(100_000)
    def __del__(self): self.x += 1; self.y = self.x * 2
late, np.kept, sys.kept = Late(), np.ones(200_000), Late()
late.itself = late
print("ended", flush=True)
"""
KILLED = AT_THE_END + "import os, signal; x = np.ones(1 << 20); os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize(
    ("code", "status"), [(AT_THE_END, 0), (KILLED, -signal.SIGKILL)], ids=["ended", "killed"]
)
def test_arrays_may_be_freed_after_everything_else_and_leave_nothing(code: str, status: int) -> None:
    before, command = shm_names(), [sys.executable, "-c", code]
    # Outside the source folder, where it would import the sources instead of an installed package.
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout, done.stderr) == (status, "ended\n", "")
    assert shm_names() == before
