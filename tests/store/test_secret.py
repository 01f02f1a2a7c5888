"""Where the job's secret comes from, which files are refused, and the warning of a process without a secret."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from fastcoll import config
from fastcoll.errors import UsageError
from fastcoll.store import TCPStore, secret

NOWHERE = "/dev/null/no folder"


@pytest.fixture(autouse=True)
def plain_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The home and the replacement for /dev/shm are empty."""
    monkeypatch.setattr(secret, "_warned", False)
    monkeypatch.setattr(secret, "_MACHINES", tmp_path / "shm")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home" / "config"))
    for folder in ("shm", "home"):
        (tmp_path / folder).mkdir()


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """Return the path of the user's own file, which does not exist yet."""
    path = tmp_path / "home" / "config" / "fastcoll" / "secret"
    path.parent.mkdir(parents=True)
    return path


def keep(path: Path, data: bytes, mode: int = 0o600) -> str:
    path.write_bytes(data)
    path.chmod(mode)
    return str(path)


def test_the_users_own_secret_is_created_at_first_use_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "home/config/fastcoll/secret"
    made = secret.job_secret()
    assert len(bytes.fromhex(made.decode())) == 32
    assert path.read_bytes() == made + b"\n"
    assert path.stat().st_mode & 0o7777 == 0o600
    assert os.listdir(path.parent) == ["secret"]
    assert secret.source() == f"the user's own, in {path}"
    assert subprocess.run(TELL, capture_output=True, check=True).stdout == made


TELL = [
    sys.executable, "-c",
    "import sys; from fastcoll.store.secret import job_secret; sys.stdout.buffer.write(job_secret())",
]  # fmt: skip


def test_a_secret_need_not_be_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTCOLL_SECRET", os.fsdecode(b"\xff"))
    assert secret.job_secret() == b"\xff"


def test_ranks_that_create_the_secret_at_once_agree(processes, own: Path) -> None:
    wait = f"import sys; sys.stdin.read(); {TELL[2]}"
    ranks = [processes.start(wait, XDG_CONFIG_HOME=str(own.parents[1])) for _ in range(3)]
    for rank in ranks:
        rank.stdin.close()
        rank.stdin = None
    assert {*processes.outputs(ranks)} == {own.read_text().strip()}
    assert os.listdir(own.parent) == ["secret"]


def test_the_file_is_private_for_every_umask(own: Path) -> None:
    before = os.umask(0o777)
    try:
        secret.job_secret()
    finally:
        os.umask(before)
    assert own.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("put", "why"),
    [
        *(
            (partial(keep, data=b"s", mode=mode), rf"others may open it \(mode {mode:04o}\)")
            for mode in (0o640, 0o604, 0o700)
        ),
        (partial(keep, data=b"\n"), "it holds no secret of 1 to 4096 bytes"),
        (lambda own: own.symlink_to(keep(own.with_name("elsewhere"), b"s")), "it is a link"),
        (lambda own: own.symlink_to(own.with_name("nothing")), "it is a link"),
        (os.mkfifo, "it is no file"),
    ],
)
def test_a_secret_that_other_users_may_have_read_is_refused(
    own: Path, put: Callable[[Path], object], why: str
) -> None:
    put(own)
    with pytest.raises(UsageError, match=rf"{why}; give every rank .* FASTCOLL_SECRET .* \(rm -f "):
        secret.job_secret()


def test_a_secret_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch, own: Path) -> None:
    keep(own, b"s")
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    why = f"it belongs to user {me}, and this process is user {me + 1}'s; give"
    with pytest.raises(UsageError, match=why):
        secret.job_secret()


@pytest.mark.parametrize("home", [NOWHERE, "missing/.config", "/proc/self"])
def test_without_a_home_the_secret_is_in_dev_shm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: str
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / home))
    made = secret.job_secret()
    (path,) = (tmp_path / "shm").iterdir()
    assert path.name == f".fastcoll-{os.geteuid()}-secret"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_bytes() == made + b"\n"
    assert not (tmp_path / "missing").exists()


def test_no_file_is_created_in_another_users_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(UsageError, match=rf"{tmp_path}/home belongs to user {me}"):
        secret.job_secret()
    assert os.listdir(tmp_path / "home") == os.listdir(tmp_path / "shm") == []
    (tmp_path / "home").chmod(0o1777)  # as in a folder like /tmp, in which all users may write
    secret._own.cache_clear()
    why = rf"config/fastcoll/secret \(a file made there is not private: it belongs to user {me}"
    with pytest.raises(UsageError, match=why):
        secret.job_secret()


def test_without_a_possible_secret_nothing_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", NOWHERE)
    monkeypatch.setattr(secret, "_MACHINES", Path("/dev/null/no shm"))
    cure = r"cannot be stored in /dev/null/.* or /dev/null/.*; give every rank .* FASTCOLL_SECRET_FILE, or .*INSECURE=1"
    for host in ("127.0.0.1", "0.0.0.0"):
        with pytest.raises(UsageError, match=cure):
            TCPStore(host, 0, is_master=True)


def test_insecure_neither_uses_nor_creates_a_secret(
    monkeypatch: pytest.MonkeyPatch, own: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FASTCOLL_INSECURE", "1")
    assert secret.job_secret() == b""
    assert os.listdir(own.parent) == []
    for _ in range(2):
        with TCPStore("127.0.0.1", 0, is_master=True):
            pass
    (record,) = caplog.records
    assert "FASTCOLL_INSECURE=1: listening on 127.0.0.1:" in record.getMessage()


def test_the_variable_precedes_the_file_and_both_precede_insecure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FASTCOLL_INSECURE", "1")
    monkeypatch.setenv("FASTCOLL_SECRET_FILE", keep(tmp_path / "secret", b"from the file\n"))
    assert secret.job_secret() == b"from the file"
    config.forget()
    monkeypatch.setenv("FASTCOLL_SECRET", "from the variable")
    assert secret.job_secret() == b"from the variable"


def test_files_with_safe_permissions_are_accepted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("640")  # as in volumes of Kubernetes
    for mode in (0o400, 0o600, 0o640, 0o440):
        keep(tmp_path / f"{mode:o}", b"s", mode)
    for name in ("400", "600", "640", "440", "link"):
        monkeypatch.setenv("FASTCOLL_SECRET_FILE", str(tmp_path / name))
        config.forget()
        assert secret.job_secret() == b"s"


@pytest.mark.parametrize(
    ("put", "why"),
    [
        *(
            (partial(keep, data=b"hush", mode=mode), rf"open to others .mode {mode:04o}.* chmod 600")
            for mode in (0o604, 0o620)
        ),
        *((partial(keep, data=data), "must hold 1 to 4096 bytes") for data in (b"", b" \n", b"hush" * 1025)),
        (lambda path: None, "cannot be read"),
        (os.mkdir, "no file"),
        (os.mkfifo, "no file"),
    ],
)
def test_unusable_secret_files_are_refused_without_showing_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, put: Callable[[Path], object], why: str
) -> None:
    put(tmp_path / "secret")
    monkeypatch.setenv("FASTCOLL_SECRET_FILE", str(tmp_path / "secret"))
    with pytest.raises(UsageError, match=why) as raised:
        secret.job_secret()
    assert "hush" not in str(raised.value)


def test_proofs_differ_by_key_label_and_opening() -> None:
    made = {
        secret.proof(key, label, (one, b"two"))
        for key in (b"k", b"l")
        for label in "ab"
        for one in (b"1", b"2")
    }
    assert [len(each) for each in made] == [secret.PROOF_SIZE] * 8
