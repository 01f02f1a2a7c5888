"""Where the job's secret comes from, and whom a process warns that has none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastcoll import config
from fastcoll.errors import UsageError
from fastcoll.rendezvous import TCPStore, secret


@pytest.fixture(autouse=True)
def plain_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("FASTCOLL_SECRET", "FASTCOLL_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(secret, "_warned", False)
    config.forget()
    yield
    config.forget()


def keep(path: Path, data: bytes, mode: int = 0o600) -> str:
    path.write_bytes(data)
    path.chmod(mode)
    return str(path)


def test_there_is_none_at_first() -> None:
    assert secret.job_secret() == b""


def test_the_variable_comes_before_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FASTCOLL_SECRET_FILE", keep(tmp_path / "secret", b"from the file\n"))
    assert secret.job_secret() == b"from the file"
    config.forget()
    monkeypatch.setenv("FASTCOLL_SECRET", "from the variable")
    assert secret.job_secret() == b"from the variable"


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o640, 0o440])
def test_files_that_are_kept_well(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: int) -> None:
    monkeypatch.setenv("FASTCOLL_SECRET_FILE", keep(tmp_path / "secret", b"s", mode))
    assert secret.job_secret() == b"s"


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o620, 0o602, 0o666])
def test_files_that_others_can_read_or_change(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: int
) -> None:
    monkeypatch.setenv("FASTCOLL_SECRET_FILE", keep(tmp_path / "secret", b"s", mode))
    with pytest.raises(UsageError, match=f"open to others .mode {mode:04o}.* chmod 600"):
        secret.job_secret()


def test_a_link_is_followed_as_kubernetes_makes_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    keep(tmp_path / "data", b"s")
    (tmp_path / "secret").symlink_to("data")
    monkeypatch.setenv("FASTCOLL_SECRET_FILE", str(tmp_path / "secret"))
    assert secret.job_secret() == b"s"


@pytest.mark.parametrize("data", [b"", b" \n", b"x" * 4097])
def test_files_that_hold_no_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, data: bytes) -> None:
    monkeypatch.setenv("FASTCOLL_SECRET_FILE", keep(tmp_path / "secret", data))
    with pytest.raises(UsageError, match="must hold 1 to 4096 bytes"):
        secret.job_secret()


def test_what_is_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, why in (
        (tmp_path / "none", "cannot be read"),
        (tmp_path, "no file"),
        (tmp_path / "pipe", "no file"),
    ):
        monkeypatch.setenv("FASTCOLL_SECRET_FILE", str(path))
        config.forget()
        with pytest.raises(UsageError, match=why):
            secret.job_secret()


def test_a_secret_is_not_shown_in_errors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FASTCOLL_SECRET_FILE", keep(tmp_path / "secret", b"hush" * 2000))
    with pytest.raises(UsageError) as raised:
        secret.job_secret()
    assert "hush" not in str(raised.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.1.1", "::1", "localhost"])
def test_nobody_is_warned_of_loopback(caplog: pytest.LogCaptureFixture, host: str) -> None:
    secret.warn_if_open(host, "there")
    assert not caplog.records


def test_a_process_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        secret.warn_if_open("10.0.0.1", "10.0.0.1:77")
        secret.warn_if_open("0.0.0.0", "all addresses")
    (record,) = caplog.records
    assert "10.0.0.1:77 without a secret" in record.getMessage()


def test_nobody_is_warned_who_has_a_secret(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FASTCOLL_SECRET", "s")
    secret.warn_if_open("10.0.0.1", "10.0.0.1:77")
    assert not caplog.records


@pytest.mark.parametrize(("host", "warns"), [("127.0.0.1", False), ("localhost", False), ("0.0.0.0", True)])
def test_the_store_warns_where_others_can_reach_it(
    caplog: pytest.LogCaptureFixture, host: str, warns: bool
) -> None:
    with TCPStore(host, 0, is_master=True):
        assert (
            any("(the store) without a secret" in record.getMessage() for record in caplog.records) == warns
        )


def test_the_store_takes_the_secret_of_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FASTCOLL_SECRET_FILE", keep(tmp_path / "secret", b"s\n"))
    with TCPStore("127.0.0.1", 0, is_master=True) as store:
        monkeypatch.setenv("FASTCOLL_SECRET", "s")
        config.forget()
        with TCPStore("127.0.0.1", store.port) as client:
            assert client.add("n", 1) == 1


def test_proofs_differ_by_key_label_and_opening() -> None:
    made = {
        secret.proof(key, label, (one, b"two"))
        for key in (b"k", b"l")
        for label in ("a", "b")
        for one in (b"1", b"2")
    }
    assert len(made) == 8
    assert {len(each) for each in made} == {secret.PROOF_SIZE}
