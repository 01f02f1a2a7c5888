"""This user's own files: what another user has put there is not followed, awaited or changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fastcoll.system.own_files import open_anew, open_own


def pipe(path: Path, _: Path) -> None:
    os.mkfifo(path)


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    path = tmp_path / "precious"
    path.write_text("of this user")
    return path


@pytest.mark.parametrize("plant", [Path.symlink_to, Path.hardlink_to, pipe])
def test_planted_files_are_refused_or_replaced_and_their_targets_unchanged(
    tmp_path: Path, precious: Path, plant: Callable[[Path, Path], None]
) -> None:
    plant(tmp_path / "file", precious)
    with pytest.raises(OSError, match=r"link"):
        os.close(open_own(tmp_path / "file", os.O_RDWR, 0o600))
    with open_anew(tmp_path / "file") as file:
        file.write(b"new")
    assert (tmp_path / "file").read_text() == "new"
    assert precious.read_text() == "of this user"


def test_another_users_file_is_refused(precious: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.close(open_own(precious, os.O_RDWR, 0o600))
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(PermissionError, match="no file of this user"):
        open_own(precious, os.O_RDWR, 0o600)


def test_a_new_file_is_made_with_its_mode(tmp_path: Path) -> None:
    os.close(open_own(tmp_path / "file", os.O_WRONLY, 0o600))
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
    os.close(open_own(tmp_path / "file", os.O_RDWR, 0o644))  # an existing file keeps its content
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
