"""The file of a FileStore: when it is removed or cleared, and which files are refused."""

from __future__ import annotations

import dataclasses
import gc
import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcoll.errors import ResourceError, StoreError, StoreTimeoutError, UsageError
from fastcoll.store import FileStore, file_store
from fastcoll.store.file_store import MAGIC, locked, open_own, read_records, record_of
from fastcoll.store.store import StalledError
from fastcoll.store.table import Op, StoreRequest
from fastcoll.system.processes import this_process

HOLD = """
import sys
from fastcoll.store import FileStore
store = FileStore(sys.argv[1])
store.set("from", "the other")
print("up", flush=True)
sys.stdin.readline()
"""


def hold(processes, path: Path):
    """Start a process that has the store open."""
    process = processes.start(HOLD, path)
    process.stdout.readline()
    return process


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_the_last_participant_removes_the_file(path: Path) -> None:
    one, two = FileStore(path), FileStore(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    one.set("k", "v")
    one.close()
    assert two.get("k") == b"v"
    del two  # a forgotten store is closed
    gc.collect()
    assert not path.exists()
    one.close()


def test_a_relative_path_keeps_its_meaning(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    with FileStore(path.name) as store:
        monkeypatch.chdir("/")
        store.set("k", "v")
        with store.clone() as other:
            assert other.get("k") == b"v"
    assert not path.exists()


def test_with_a_world_size_the_file_stays_until_all_have_come(path: Path) -> None:
    with FileStore(path, 2) as store:
        store.set("k", "v")
    assert path.exists()
    with FileStore(path, 2) as store:
        assert store.get("k") == b"v"
    assert not path.exists()


def test_other_processes_share_the_file_and_their_normal_exit_closes_it(path: Path, processes) -> None:
    other = hold(processes, path)
    with FileStore(path) as store:
        assert store.get("from") == b"the other"
        assert {process.pid for process in store.participants()} == {os.getpid(), other.pid}
        other.communicate("\n")
        assert {process.pid for process in store.participants()} == {os.getpid()}
    assert not path.exists()


def test_the_file_of_a_killed_job_is_cleared(path: Path, processes) -> None:
    killed = hold(processes, path)
    killed.kill()
    killed.wait()
    with FileStore(path) as store:
        assert store.num_keys() == 0
    assert not path.exists()


def test_a_file_in_use_is_not_cleared(path: Path, processes) -> None:
    killed, living = hold(processes, path), hold(processes, path)
    killed.kill()
    killed.wait()
    with FileStore(path) as store:
        assert store.check(["from"])
        assert len(store.participants()) == 3
    assert path.exists()
    living.communicate("\n")  # the last living participant removes it
    assert not path.exists()


def abandon(store: FileStore) -> None:
    """Leave the store as a killed process does: it remains a participant."""
    store._leave.detach()
    os.close(store._log._fd)


def test_a_file_from_before_a_reboot_is_cleared(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = dataclasses.replace(this_process(), boot_id="an earlier boot")
    for is_touched in (True, False):
        with monkeypatch.context() as patched:
            patched.setattr(file_store, "this_process", lambda: before)
            old = FileStore(path)
            old.set("k", "v")
            abandon(old)
        if not is_touched:
            os.utime(path, (1, 1))
        store = FileStore(path)
        # A file that was written since the boot may belong to another machine with the same name.
        assert store.check(["k"]) == is_touched
        abandon(store)
        path.unlink()


def test_another_hosts_participants_count_as_alive(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        far = dataclasses.replace(this_process(), host="elsewhere", boot_id="another")
        patched.setattr(file_store, "this_process", lambda: far)
        other = FileStore(path)
    other.set("k", "v")
    os.utime(path, (1, 1))
    with FileStore(path) as store, other:
        assert store.get("k") == b"v"


@pytest.mark.parametrize("mode", [0o602, 0o660])
def test_a_file_that_others_may_write_to_is_refused(path: Path, mode: int) -> None:
    path.touch()
    path.chmod(mode)
    why = rf"others may write to .* \(mode {mode:04o}\).*; chmod 600 {path}, or"
    with pytest.raises(UsageError, match=why):
        FileStore(path)
    path.chmod(0o644)
    FileStore(path).close()


def test_another_users_file_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.touch()
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with pytest.raises(UsageError, match=rf"{path} belongs to user {uid}, not to this one"):
        FileStore(path)


@pytest.mark.parametrize(
    ("put", "why"),
    [
        (lambda path: path.symlink_to(path.with_name("target")), "{path} is a symbolic link"),
        (lambda path: path.parent.rmdir(), "there is no directory {path.parent}; make it"),
        (os.mkdir, "is a directory"),
        (os.mkfifo, "not a regular file"),
        (lambda path: path.write_text("my thesis"), "is not a fastcoll store"),
    ],
)
def test_a_file_with_other_content_is_not_changed(
    tmp_path: Path, put: Callable[[Path], object], why: str
) -> None:
    path = tmp_path / "folder" / "store"
    path.parent.mkdir()
    put(path)
    with pytest.raises(UsageError, match=why.format(path=path)):
        FileStore(path)
    assert not path.with_name("target").exists()
    assert not path.is_file() or path.read_text() == "my thesis"


@pytest.mark.parametrize(
    "torn", [b"\x01", record_of(StoreRequest(Op.SET, (b"key",), (b"value",)))[:-1], MAGIC[:5]]
)
def test_an_incomplete_record_at_the_end_is_removed(path: Path, torn: bytes) -> None:
    with FileStore(path) as one, FileStore(path) as two:
        one.set("a", "1")
        with path.open("ab") as file:
            file.write(torn)
        two.set("b", "2")
        assert one.multi_get(["a", "b"]) == [b"1", b"2"]


@pytest.mark.parametrize("begun", [b"", MAGIC[:7]])
def test_an_empty_file_and_an_incomplete_header_are_accepted(path: Path, begun: bytes) -> None:
    path.write_bytes(begun)
    path.chmod(0o600)
    with FileStore(file_name=path, world_size=1) as store:  # named as in torch
        assert store.path == str(path)
        assert store.num_keys() == 0
        store.set("k", "v")
    assert not path.exists()


def test_damage_is_named(path: Path) -> None:
    with FileStore(path) as one:
        size = path.stat().st_size
        one.set("key", "value")
        with path.open("r+b") as file:
            file.seek(size + 17)
            file.write(b"X")
        with pytest.raises(
            StoreError, match=rf"{path} cannot be read: the record at byte {size} of the log is damaged"
        ):
            FileStore(path)
        path.write_bytes(b"")
        with pytest.raises(StoreError, match="changed by another program"):
            one.get("key")
        abandon(one)
        one._leave = lambda: None


def test_a_mostly_obsolete_log_is_compacted(path: Path, processes) -> None:
    """Earlier readers, later readers and former participants are still distinguished; a killed writer is harmless."""
    other = hold(processes, path)
    with FileStore(path, 4) as one, FileStore(path, 4) as idle:
        assert idle.get("from") == b"the other"
        FileStore(path, 4).close()
        one.set("kept", "x" * 100_000)
        for turn in range(3):
            for number in range(400):
                one.set(f"{number % 3}", f"{turn}{number}".ljust(10_000))
                one.add("n", 1)
            if turn == 1:  # as a writer that is killed before it sets the offset
                one._log._write(record_of(StoreRequest(Op.SET, (b"n",), (b"800",))))
        assert path.stat().st_blocks * 512 < 3 << 20 < path.stat().st_size
        assert idle.add("n", 0) == 1200
        assert idle.get("1") == b"2397".ljust(10_000)
        assert idle.delete_key("kept")
        with FileStore(path, 4) as late:
            assert {process.pid for process in late.participants()} == {os.getpid(), other.pid}
            assert (late.num_keys(), late.add("n", 0), late.get("from")) == (5, 1200, b"the other")
            assert late._log._opened == 5
        other.communicate("\n")
    assert not path.exists()


def test_a_full_disk_leaves_the_store_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FileStore(path) as store:
        store.set("k", "v")

        def full(fd: int, data: bytes, at: int) -> int:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(os, "pwrite", full)
            with pytest.raises(ResourceError, match=rf"{path} cannot be written: No space left"):
                store.set("k", "other")
        assert store.get("k") == b"v"
        store.set("k", "third")
        with FileStore(path) as other:
            assert other.get("k") == b"third"


def test_a_file_removed_by_hand_does_not_break_closing(path: Path) -> None:
    store = FileStore(path)
    path.unlink()
    with FileStore(path) as other:
        other.set("k", "v")
        store.close()
        assert path.exists()
        assert other.get("k") == b"v"


def test_a_lock_that_is_not_released_is_a_timeout(path: Path) -> None:
    fd = open_own(str(path))
    try:
        with locked(fd, str(path), 0.0), pytest.raises(StoreTimeoutError, match=rf"the lock of {path}"):
            FileStore(path, timeout=0.05)
    finally:
        os.close(fd)


def test_a_wait_ends_soon_after_its_own_timeout_if_the_lock_is_not_released(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that holds the lock may be stopped; a rank that waits in short waits sees to its peers meanwhile."""
    monkeypatch.setattr(file_store, "_GRACE_SECONDS", 0.0)
    with FileStore(path, timeout=60.0) as store:
        fd = open_own(str(path))
        with locked(fd, str(path), 0.0):
            for call in (lambda: store.wait(["k"], 0.0), store.participants):
                with pytest.raises(StalledError, match=rf"the lock of {path}"):
                    call()
        os.close(fd)


def test_a_forked_child_may_close_a_store_that_a_thread_of_its_parent_was_using(path: Path) -> None:
    with FileStore(path) as store:
        with store._mutex:
            child = os.fork()
            if not child:
                signal.alarm(60)
                store.close()
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        store.set("k", "v")


def test_a_signal_handler_may_close_the_store_but_not_use_it(
    path: Path, monkeypatch: pytest.MonkeyPatch, in_threads
) -> None:
    store = FileStore(path)
    apply = store._log.apply

    def interrupted(request: StoreRequest) -> list[bytes]:
        with pytest.raises(UsageError, match="signal handler"):
            store.get("k")
        store.close()
        return apply(request)

    monkeypatch.setattr(store._log, "apply", interrupted)
    in_threads(lambda: store.set("k", "v"))
    with pytest.raises(StoreError, match="closed"):
        store.get("k")
    with FileStore(path) as other:
        assert other.get("k") == b"v"
    store._leave()  # as when the process ends
    assert not path.exists()


def test_many_processes_count_right(path: Path, processes) -> None:
    source = """
import sys
from fastcoll.store import FileStore
with FileStore(sys.argv[1]) as store:
    for _ in range(200):
        store.add("n", 1)
    store.barrier("done", 3)
    print(store.add("n", 0))
"""
    assert processes.outputs([processes.start(source, path) for _ in range(3)]) == ["600"] * 3
    assert not path.exists()


texts = st.binary(max_size=30).map(lambda data: (data,))
records = st.tuples(st.builds(StoreRequest, st.just(Op.APPEND), texts, texts), st.booleans())


@given(st.lists(records, max_size=5), st.integers(0, 400))
def test_a_truncated_log_yields_its_complete_records(
    written: list[tuple[StoreRequest, bool]], cut: int
) -> None:
    data = b"".join(record_of(*record) for record in written)[:cut]
    read = [record for *record, _ in read_records(data)]
    assert read == [list(record) for record in written[: len(read)]]
    assert len(read) == len(written) or sum(len(record_of(*each)) for each in written[: len(read) + 1]) > cut


@given(st.binary(max_size=200))
def test_random_bytes_are_records_or_an_error(data: bytes) -> None:
    try:
        for request, _, end in read_records(data):
            assert end <= len(data)
            assert isinstance(request, StoreRequest)
    except StoreError:
        pass
