#!/usr/bin/env bash
# Run all_reduce on 64-bit Arm, emulated by qemu-user, and kill a rank: tests/arm.sh [FOLDER]
#
# FOLDER (default: a temporary one) gets what this needs, and may be used again: an arm64 Debian, which is only
# unpacked, wheels for it from PyPI, and the compiled kernels. Needs Debian, root and some 1 GB of disk; compiling the
# kernels takes minutes. qemu runs each program on this machine's kernel, without a chroot and without binfmt_misc:
# sys.executable is a script that starts qemu.
#
# The emulator does not reorder stores as an Arm processor may; tests/shm/test_weak_model.py does. Under qemu 7.2 the
# launcher fails (prctl refuses PR_SET_CHILD_SUBREAPER), and so does the backend tcp ("Protocol not available").
set -euo pipefail
ROOT=$(cd "$(dirname "$0")/.." && pwd)
FOLDER=${1:-$(mktemp -d)}
mkdir -p "$FOLDER"
FOLDER=$(cd "$FOLDER" && pwd)
[ $# -gt 0 ] || trap 'rm -rf "$FOLDER"' EXIT
SUITE=bookworm PYTHON=3.11

if ! command -v qemu-aarch64-static debootstrap >/dev/null; then
    apt-get update
    DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends qemu-user-static debootstrap
fi

# ---- Debian: the packages are unpacked, and no program of theirs runs ----
if [ ! -e "$FOLDER/debian/usr/bin/python$PYTHON" ]; then
    rm -rf "$FOLDER/stage" "$FOLDER/debian"
    debootstrap --arch=arm64 --foreign --variant=minbase --include="python$PYTHON" $SUITE "$FOLDER/stage"
    mkdir "$FOLDER/debian"
    for package in "$FOLDER"/stage/var/cache/apt/archives/*.deb; do
        dpkg-deb --extract "$package" "$FOLDER/debian"
    done
    # qemu looks for a path in this folder first, and these must be this machine's.
    (cd "$FOLDER/debian" && rm -rf boot dev etc home media mnt opt proc root run srv sys tmp var)
    rm -rf "$FOLDER/stage"
fi

# ---- Python's packages ----
if [ ! -e "$FOLDER/packages/numba" ]; then
    python3 -m pip install --quiet --target "$FOLDER/packages" --only-binary=:all: --implementation cp \
        --python-version $PYTHON --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 \
        --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 \
        numpy numba posix_ipc
fi

# ---- the interpreter ----
mkdir -p "$FOLDER/bin" "$FOLDER/shim"
cat >"$FOLDER/bin/python" <<END
#!/bin/sh
exec qemu-aarch64-static -L "$FOLDER/debian" -0 "$FOLDER/bin/python" "$FOLDER/debian/usr/bin/python$PYTHON" "\$@"
END
chmod +x "$FOLDER/bin/python"
# qemu invents /proc/PID/stat of its own process, with another start time than other processes read. The same fields
# are in /proc/PID/task/PID/stat.
cat >"$FOLDER/shim/sitecustomize.py" <<'END'
import builtins
import re

_open, _stat = builtins.open, re.compile(r"/proc/(\d+)/stat")


def _open_true(file, *args, **kwargs):
    if isinstance(file, str) and (found := _stat.fullmatch(file)):
        file = f"/proc/{found[1]}/task/{found[1]}/stat"
    return _open(file, *args, **kwargs)


builtins.open = _open_true
END

# PYTHONHOME is inside the unpacked Debian, as qemu sees it.
export PYTHONHOME=/usr PYTHONPATH="$FOLDER/shim:$ROOT:$FOLDER/packages" PYTHONDONTWRITEBYTECODE=1
export NUMBA_CACHE_DIR="$FOLDER/kernels" XDG_CONFIG_HOME="$FOLDER/config" FASTCOLL_UNTESTED_PLATFORM=1
export FASTCOLL_TIMEOUT=1200 MASTER_ADDR=127.0.0.1
cd "$FOLDER"

cat >words.py <<'END'
import platform
import time

import numpy as np

from fastcoll.kernels.shared_words import publish_in, read_in
from fastcoll.shm.tuning_table import read_clock

assert platform.machine() == "aarch64"
table = np.zeros(2, np.int64)
publish_in(table, 1, -77)
assert table.tolist() == [0, -77]
assert read_in(table, 1) == -77
read_clock.call()  # the first call compiles
began, clock = time.perf_counter_ns(), read_clock.call()
time.sleep(0.2)
ratio = (read_clock.call() - clock) / (time.perf_counter_ns() - began)
assert 0.9 < ratio < 1.1, ratio
END
cat >program.py <<'END'
import os
import signal

import numpy as np

import fastcoll as dist

dist.init_process_group(backend="shm")
rank, size = dist.get_rank(), dist.get_world_size()
x = np.full(4, rank + 1.0, np.float32)
dist.all_reduce(x)
assert x.tolist() == [size * (size + 1) / 2] * 4, x
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    dist.all_reduce(x)
except dist.PeerDiedError as error:
    assert error.ranks == (1,), error.ranks
    print(f"rank {rank} has {x} and says: {error}", flush=True)
    os._exit(0)  # the group has failed
os._exit(1)
END

"$FOLDER/bin/python" words.py
for size in 2 3; do
    port=$(python3 -I -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])')
    ranks=()
    for ((rank = 0; rank < size; rank++)); do
        RANK=$rank LOCAL_RANK=$rank WORLD_SIZE=$size MASTER_PORT=$port "$FOLDER/bin/python" program.py &
        ranks+=($!)
    done
    for ((rank = 0; rank < size; rank++)); do
        code=0
        wait "${ranks[rank]}" || code=$?
        [ $code = $((rank == 1 ? 137 : 0)) ] || { echo "rank $rank of $size: exit code $code" >&2; exit 1; }
    done
done
echo "64-bit Arm: all_reduce of 2 and 3 ranks, and a killed rank, as expected"
