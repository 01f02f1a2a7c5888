"""A rank whose every other transfer fails with ENOBUFS or ENOMEM, as if the kernel were short of memory.

    python -m fastcoll.launch -n 2 short_of_memory.py

seccomp passes the system calls of the rank's thread to another thread (SECCOMP_RET_USER_NOTIF), which lets the kernel
execute them or answers with an error. Exits with 77 where that is not possible.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
import sys
import threading

import numpy as np

import fastcoll as dist

_CALLS = {
    "x86_64": (317, {44, 45, 46, 47}),
    "aarch64": (277, {206, 207, 211, 212}),
}  # seccomp; sends and receives
_SET_FILTER, _NEW_LISTENER, _NO_NEW_PRIVILEGES = 1, 8, 38
_LOAD, _IF_EQUAL, _RETURN, _ALLOW, _ASK = 0x20, 0x15, 0x06, 0x7FFF0000, 0x7FC00000
_RECEIVE, _SEND, _CONTINUE = 0xC0502100, 0xC0182101, 1

failed = 0


def be_short() -> None:
    """Apply this to the calling thread from now on; OSError: it is not possible."""
    number, calls = _CALLS[os.uname().machine]
    ask = [(_IF_EQUAL, 0, len(calls) - at, call) for at, call in enumerate(calls, 1)]
    # An equal number jumps over the remaining comparisons and the ALLOW.
    ask = [(code, len(calls) - at, 0, call) for at, (code, _, _, call) in enumerate(ask)]
    program = [(_LOAD, 0, 0, 0), *ask, (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ASK)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in program))
    words = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    listener = libc.syscall(number, _SET_FILTER, _NEW_LISTENER, words)
    if listener < 0:
        raise OSError(ctypes.get_errno(), "seccomp")
    started.append(listener)
    ready.set()


started: list[int] = []
ready = threading.Event()


def answer() -> None:
    """Let every other call fail; runs on a thread that began before the filter."""
    global failed
    ready.wait()
    number = 0
    while True:
        asked = bytearray(80)
        fcntl.ioctl(started[0], _RECEIVE, asked)
        number += 1
        error = (0, errno.ENOBUFS, 0, errno.ENOMEM)[number % 4]
        failed += error > 0
        (which,) = struct.unpack_from("Q", asked)
        fcntl.ioctl(started[0], _SEND, struct.pack("QqiI", which, 0, -error, 0 if error else _CONTINUE))


def around(x: np.ndarray) -> None:
    """Send an array from rank 1 to the other rank and back."""
    y = np.empty_like(x)
    if dist.get_rank():
        dist.send(x, 0)
        dist.recv(y, 0)
    else:
        dist.recv(y, 1)
        dist.send(x, 1)
    np.testing.assert_array_equal(x, y)


def main() -> None:
    """Run the check; see the top of the file."""
    dist.init_process_group("tcp", timeout=60)
    rank, x = dist.get_rank(), np.ones(1)
    dist.all_reduce(x)
    around(x)  # connections are made of several transfers each: every second one would always fail
    if rank:
        threading.Thread(target=answer, daemon=True).start()
        try:
            be_short()
        except (OSError, KeyError) as error:
            print(error, file=sys.stderr)
            os._exit(77)
    for count in (1, 1000, 200_000):
        x = np.arange(count) + float(rank)
        dist.all_reduce(x)
        np.testing.assert_array_equal(x, 2 * np.arange(count) + 1.0)
        around(x)
    print(f"rank {rank}: {failed} failed", flush=True)
    os._exit(0)  # else the errors would also hit sockets that Python closes


if __name__ == "__main__":
    main()
