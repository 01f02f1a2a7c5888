"""Replace what qemu-user 11.1.3 lacks, in each Python that it runs (../arm.sh).

/proc/PID/stat  qemu invents that of its own process, with another start time than other processes read. The same fields
                are in /proc/PID/task/PID/stat.
IP_BIND_ADDRESS_NO_PORT  setsockopt refuses it with ENOPROTOOPT. Without the option the kernel reserves the local port a
                moment earlier.
"""

from __future__ import annotations

import builtins
import re
import socket

_open, _set = builtins.open, socket.socket.setsockopt
_STAT, _BIND_ADDRESS_NO_PORT = re.compile(r"/proc/(\d+)/stat"), 24


def _open_true(file, *args, **kwargs):
    if isinstance(file, str) and (found := _STAT.fullmatch(file)):
        file = f"/proc/{found[1]}/task/{found[1]}/stat"
    return _open(file, *args, **kwargs)


def _set_known(self, level, option, *value):
    if (level, option) != (socket.IPPROTO_IP, _BIND_ADDRESS_NO_PORT):
        _set(self, level, option, *value)


builtins.open, socket.socket.setsockopt = _open_true, _set_known
