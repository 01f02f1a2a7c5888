"""Wrong settings are refused, by the name of the variable, before they are used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fastcoll import config
from fastcoll.errors import UsageError
from fastcoll.shm import tuning_cache


@pytest.fixture(autouse=True)
def _read_anew() -> Iterator[None]:
    config.forget()
    yield
    config.forget()


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("FASTCOLL_SHM_BYTES_PER_RANK", "0", "must be greater than 0"),
        ("FASTCOLL_SHM_BYTES_PER_RANK", "-4096", "must be greater than 0"),
        ("FASTCOLL_SHM_BYTES_PER_RANK", "4M", "invalid literal"),
        ("FASTCOLL_TIMEOUT", "inf", "at most 1e\\+09"),
        ("FASTCOLL_TIMEOUT", "nan", "at most 1e\\+09"),
        ("FASTCOLL_TIMEOUT", "0", "greater than 0"),
        ("FASTCOLL_WARN_AFTER", "-1", "greater than 0"),
    ],
)
def test_wrong_settings_are_refused(
    name: str, text: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(UsageError, match=rf"{name}='{text}' cannot be used \(.*{reason}"):
        config.check()


def test_warnings_about_late_ranks_can_be_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTCOLL_WARN_AFTER", "inf")
    assert config.get("FASTCOLL_WARN_AFTER") == float("inf")


def test_a_folder_that_depends_on_where_a_rank_starts_is_ignored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for given, folder in (("relative", tmp_path / ".config"), (str(tmp_path / "own"), tmp_path / "own")):
        monkeypatch.setenv("XDG_CONFIG_HOME", given)
        assert config.user_folder() == folder / "fastcoll"


def test_paths_do_not_follow_the_program_to_another_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = ("FASTCOLL_TRACE_DIR", "FASTCOLL_PROFILE_DIR", "FASTCOLL_TUNING", "FASTCOLL_SECRET_FILE")
    for name in names:
        monkeypatch.setenv(name, "here")
    monkeypatch.chdir(tmp_path)
    config.check()
    monkeypatch.chdir("/")
    assert [config.get(name) for name in names] == [str(tmp_path / "here")] * 4


def test_no_file_for_tuning_is_no_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTCOLL_TUNING", "none")
    assert tuning_cache.path() is None


def test_an_unknown_variable_with_our_prefix(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("FASTCOLL_TIMOUT", "FASTCOLL_BETWEEN_NODE", "FASTCOLL_X", "FASTCOLL_TCP_STREAMS"):
        monkeypatch.setenv(name, "1")
    config.warn_of_unknown()
    config.warn_of_unknown()
    between, timeout, other = sorted(record.getMessage() for record in caplog.records)
    assert between.endswith(
        "FASTCOLL_BETWEEN_NODE is no setting of fastcoll; did you mean FASTCOLL_BETWEEN_NODES?"
    )
    assert timeout.endswith("FASTCOLL_TIMOUT is no setting of fastcoll; did you mean FASTCOLL_TIMEOUT?")
    assert "FASTCOLL_X is no setting of fastcoll; there are FASTCOLL_TIMEOUT, FASTCOLL_WARN_AFTER," in other


def test_what_only_a_build_reads_is_no_unknown_variable() -> None:
    assert config.unknown({**dict.fromkeys(config.OF_THE_BUILD, "all"), "PATH": "/"}) == {}
    assert [*config.unknown({"FASTCOLL_BUILD_LEVEL": "all"})] == ["FASTCOLL_BUILD_LEVEL"]
