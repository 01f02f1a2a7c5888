"""A small or full /dev/shm: an error with sizes and the cure on every rank, or a smaller group; never SIGBUS."""

from __future__ import annotations

import os
import sys

import pytest
from programs import at_once

PROGRAM = """
import sys
sys.path.insert(0, {path!r})
from faults import crew, victims
if __name__ == "__main__":
    for outcome in crew.run(victims.make_world, 2):
        print("RESULT", outcome.exitcode, outcome.result if outcome.result is not None else outcome.error)
"""


ARRAYS = """
import logging, sys
import numpy as np, fastcoll
logging.basicConfig(stream=sys.stdout, format="WARNING %(message)s")
fastcoll.shared_arrays.enable()
arrays = [np.full(1 << 18, k, np.float32) for k in range(40)]  # 40 MiB where 16 are
shared = [fastcoll.shared_arrays.contains(x) for x in arrays]
assert all((x == k).all() for k, x in enumerate(arrays))
print("RESULT", sum(shared), shared == sorted(shared, reverse=True))
del arrays
print("RESULT", fastcoll.shared_arrays.contains(np.ones(1 << 18, np.float32)))
"""


FULL = """
import os
import numpy as np, fastcoll as dist

def error_of(work):
    try:
        work.wait()
    except dist.FastcollError as error:
        return error

def call(what, x, group):
    if what == "all_reduce":
        dist.all_reduce(x, group=group)
    elif what == "async":
        dist.all_reduce(x, group=group, async_op=True).wait()
    elif dist.get_rank() == 1:
        dist.recv(x[:9], 0, group=group)
    elif what == "send":
        dist.send(x[:9], 1, group=group)
    else:
        works = [dist.irecv(x[9:], 1, group=group)] if what == "irecv" else []
        works.append(dist.isend(x[:9], 1, group=group))
        raise [error_of(work) for work in works][0]
    return "no error"

def work():
    said = []
    for what in ("all_reduce", "async", "send", "isend", "irecv"):
        group = dist.new_group(timeout=60)
        x = np.ones(100_000, np.float32)
        dist.all_reduce(x[:4], group=group)
        dist.barrier()
        if dist.get_rank() == 0:
            free, filler = os.statvfs("/dev/shm"), os.open("/dev/shm/filler", os.O_CREAT | os.O_RDWR)
            os.posix_fallocate(filler, 0, free.f_bavail * free.f_frsize)
        dist.barrier()
        for _ in range(3):
            dist.all_reduce(x[:4], group=group)  # small calls need no more memory
        try:
            said.append(f"{what}: {call(what, x, group)}")
        except dist.FastcollError as error:
            said.append(f"{what}: {type(error).__name__}: {error}".replace("\\n", " "))
        dist.barrier()
        if dist.get_rank() == 0:
            os.close(filler)
            os.unlink("/dev/shm/filler")
        dist.destroy_process_group(group)
    return said

if __name__ == "__main__":
    for said in zip(*dist.run(work, 2)):
        print("RESULT", *said, sep="\\t")
"""


MANY_GROUPS = """
import os
os.environ["FASTCOLL_SHM_ALGORITHMS"] = "close"  # through the slots
import numpy as np, fastcoll as dist

def work():
    groups = [dist.new_group() for _ in range(30)]
    for turn in range(2):
        for number, group in enumerate(groups):
            x = np.arange(100_000.0) + turn + number + dist.get_rank()
            dist.all_reduce(x, group=group)
            assert (x == 2 * (np.arange(100_000.0) + turn + number) + 1).all()
            assert dist.all_reduce(np.ones(100_000), group=groups[number - 1], async_op=True).wait()
    status = os.statvfs("/dev/shm")
    return (status.f_blocks - status.f_bfree) * status.f_frsize >> 20

if __name__ == "__main__":
    for used in dist.run(work, 2):
        print("RESULT", used)
"""


OF_TWO_USERS = """
import sys
import numpy as np, fastcoll as dist
dist.init_process_group("shm", init_method=sys.argv[1], rank=int(sys.argv[2]), world_size=2, timeout=60)
for n in (1, 1000, 1 << 18):  # the last one is read where it is, if the other process may be read
    x, both = np.full(n, dist.get_rank() + 1, np.float32), np.empty(2 * n, np.float32)
    dist.all_gather_into_tensor(both, x)
    assert (both == np.repeat([1, 2], n)).all()
    dist.all_reduce(x)
    assert (x == 3).all()
dist.destroy_process_group()
"""


def run_behind(tmp_path, mount: str, program: str = PROGRAM) -> list[str]:
    """Return a program's results and warnings in a mount namespace, after a command that mounts file systems."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small /dev/shm in a namespace of its own")
    script = tmp_path / "program.py"
    script.write_text(program.replace("{path!r}", repr(os.path.dirname(os.path.dirname(__file__)))))
    (done,) = at_once([["unshare", "-m", "sh", "-c", f"{mount} && exec {sys.executable} {script}"]])
    results = [line for line in done.stdout.splitlines() if line.startswith(("RESULT", "WARNING"))]
    assert done.returncode == 0, done.stderr
    assert len(results) >= 2, done.stderr
    return results


SHM = "mount -t tmpfs -o {} tmpfs /dev/shm"
DEVICES = "mknod /dev/null c 1 3 && mknod /dev/urandom c 1 9 && chmod 666 /dev/null /dev/urandom"
MOUNT = "mount a writable tmpfs there"
REFUSED = {
    "too small": (SHM.format("size=16k"), ["KiB free", "--shm-size"]),
    "read-only": (SHM.format("ro"), ["cannot create shared memory in /dev/shm: ", MOUNT]),
    "missing": (f"mount -t tmpfs tmpfs /dev && {DEVICES}", ["there is no /dev/shm; ", MOUNT]),
}


@pytest.mark.long
@pytest.mark.parametrize("how", REFUSED)
def test_unusable_shared_memory_is_refused_with_the_cure_on_every_rank(tmp_path, how):
    mount, texts = REFUSED[how]
    for result in run_behind(tmp_path, mount):
        assert result.startswith("RESULT 0 ")
        assert all(text in result for text in texts), result


def test_small_shared_memory_means_smaller_segments(tmp_path):
    assert run_behind(tmp_path, SHM.format("size=1m")) == ["RESULT 0 "] * 2


def test_memory_that_is_full_when_a_group_needs_more_is_an_error_on_every_rank(tmp_path):
    """The error names the rank that could not get memory, and what to do."""
    results = run_behind(tmp_path, SHM.format("size=32m"), FULL)
    assert len(results) == 5, results
    for said in results:
        _, *ranks = said.split("\t")
        assert all("KiB are needed" in text and "--shm-size" in text for text in ranks), said
        assert any(": ResourceError: /dev/shm has " in text for text in ranks), said


@pytest.mark.long
def test_thirty_groups_with_large_calls_fit_into_a_small_shared_memory(tmp_path):
    """Their slots would take 60 MiB."""
    for result in run_behind(tmp_path, SHM.format("size=16m"), MANY_GROUPS):
        assert int(result.split()[1]) <= 13, result


def test_shared_arrays_beyond_the_free_memory_are_ordinary_ones(tmp_path):
    warning, arrays, afterwards = run_behind(tmp_path, SHM.format("size=16m"), ARRAYS)
    assert "WARNING /dev/shm is full, so new shared arrays are made in ordinary memory" in warning
    assert "--shm-size" in warning
    assert arrays == "RESULT 14 True"  # a sixteenth is left for other processes
    assert afterwards == "RESULT True"


def test_ranks_in_different_user_namespaces(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("needs root, to make a user namespace wherever one can be made")
    program = [sys.executable, "-c", OF_TWO_USERS, f"file://{tmp_path}/meeting"]
    ends = at_once([[*program, 0], ["unshare", "--user", "--map-root-user", *program, 1]])
    assert [end.returncode for end in ends] == [0, 0], ends
