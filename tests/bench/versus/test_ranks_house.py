"""What a rank changes in its own process; it is permanent, so each test runs in a new process."""

import json
import os
from pathlib import Path

import pytest
from programs import python

BENCH = Path(__file__).resolve().parents[3] / "bench"


def run(code):
    """Run a program that can import the modules of bench/, and parse its last line as JSON."""
    done = python("-c", code, cwd=BENCH, environ={"PYTHONPATH": str(BENCH)})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


PLACED = """
import json, os, threading
from versus.pinning import pin, place_threads
cores, rank = {cores}, 1
pin(cores, rank)
stop = threading.Event()
thread = threading.Thread(target=stop.wait)
thread.start()
{before}
try:
    print(json.dumps(place_threads(cores, rank)))
except RuntimeError as error:
    print(json.dumps(str(error)))
stop.set()
"""
CORES = sorted(os.sched_getaffinity(0))


@pytest.mark.parametrize(("cores", "caller"), [(CORES, CORES[1 % len(CORES) :][:1]), ([], CORES)])
def test_the_caller_is_pinned_if_asked_and_the_librarys_threads_have_all_cores(cores, caller):
    assert run(PLACED.format(cores=cores, before="")) == {"caller": caller, "others": CORES}


@pytest.mark.skipif(len(CORES) < 2, reason="there is one core")
def test_a_library_that_moves_the_caller_is_an_error():
    text = run(PLACED.format(cores=CORES, before=f"os.sched_setaffinity(0, {set(CORES)})"))
    assert "rank 1 is not pinned as the others are" in text


COUNTED = """
import ctypes, json, os, threading
from versus import single_copy
total = single_copy.count()
libc = ctypes.CDLL(None, use_errno=True)
source, target = ctypes.create_string_buffer(b"from", 8), ctypes.create_string_buffer(8)

class Piece(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("size", ctypes.c_size_t)]

def copy(function, here, there):
    mine, other = Piece(ctypes.addressof(here), 8), Piece(ctypes.addressof(there), 8)
    assert function(os.getpid(), ctypes.byref(mine), 1, ctypes.byref(other), 1, 0) == 8, ctypes.get_errno()

before = total()
copy(libc.process_vm_readv, target, source)
thread = threading.Thread(target=copy, args=(libc.process_vm_writev, source, target))
thread.start()
thread.join()
print(json.dumps([before, total(), target.value.decode()]))
"""


def test_single_copies_are_counted_and_done_by_any_thread():
    assert run(COUNTED) == [0, 2, "from"]
