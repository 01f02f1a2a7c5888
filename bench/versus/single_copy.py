"""Count how often a library copies between two processes by a system call.

Such a copy is called a *single copy*. A seccomp filter passes each `process_vm_readv` and `process_vm_writev` of this
process and its threads to a child that counts the call and lets it proceed. The filter needs Linux 5.5 or later, but no
privileges, no debugger, and no support by the library. It costs some microseconds per copy, so copies are counted in a
separate run. XPMEM and KNEM make single copies without these system calls; their devices show whether they are
available.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
import signal
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# The number of seccomp, and the values that the filter compares: AUDIT_ARCH, process_vm_readv, process_vm_writev.
_NUMBERS = {"x86_64": (317, 0xC000003E, 310, 311), "aarch64": (277, 0xC00000B7, 270, 271)}
_SET_PDEATHSIG, _SET_NO_NEW_PRIVS = 1, 38
_SET_MODE_FILTER, _NEW_LISTENER = 1, 8
_ALLOW, _NOTIFY = 0x7FFF0000, 0x7FC00000
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_RECEIVE, _SEND = 0xC0502100, 0xC0182101  # ioctls of the listener
_NOTE_BYTES = 80  # struct seccomp_notif
_CONTINUE = 1


def devices() -> list[str]:
    """Return the other mechanisms for single copies that this machine has."""
    return [name for name in ("xpmem", "knem") if Path("/dev", name).exists()]


def count() -> Callable[[], int]:
    """Start counting, before the library starts; return a function that returns the count.

    Raises:
        OSError: the kernel or a container does not allow it, or the processor is unknown here.
    """
    if platform.machine() not in _NUMBERS:
        raise OSError(f"no numbers of system calls for {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    seccomp, *wanted = _NUMBERS[platform.machine()]
    libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    code = _filter(*wanted)
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(code))
    listener = libc.syscall(seccomp, _SET_MODE_FILTER, _NEW_LISTENER, ctypes.create_string_buffer(program))
    if listener < 0:
        raise OSError(ctypes.get_errno(), "a seccomp filter with a listener is not allowed here")
    total = mmap.mmap(-1, 8)
    if os.fork() == 0:
        try:
            libc.prctl(_SET_PDEATHSIG, signal.SIGKILL)
            _serve(listener, total)
        finally:
            os._exit(1)
    os.close(listener)
    return lambda: int.from_bytes(total[:8], "little")


def _filter(arch: int, readv: int, writev: int) -> ctypes.Array[ctypes.c_char]:
    """Return a classic BPF program that notifies the listener of two system calls.

    It allows all others. It reads `struct seccomp_data`, which has the system call's number at 0 and the architecture
    at 4.
    """
    steps = [
        (_LOAD, 0, 0, 4),
        (_JUMP_IF_EQUAL, 0, 4, arch),
        (_LOAD, 0, 0, 0),
        (_JUMP_IF_EQUAL, 1, 0, readv),
        (_JUMP_IF_EQUAL, 0, 1, writev),
        (_RETURN, 0, 0, _NOTIFY),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps), 8 * len(steps))


def _serve(listener: int, total: mmap.mmap) -> None:
    """Run the child: count system calls and let them proceed, until the parent ends."""
    number = 0
    while True:
        note = bytearray(_NOTE_BYTES)
        with suppress(FileNotFoundError):  # the caller was killed meanwhile
            fcntl.ioctl(listener, _RECEIVE, note)
            number += 1
            total[:8] = number.to_bytes(8, "little")
            fcntl.ioctl(listener, _SEND, note[:8] + struct.pack("qiI", 0, 0, _CONTINUE))
