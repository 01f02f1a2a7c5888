"""Files that a run is to write."""

from pathlib import Path

import pytest

from fastcoll.bench.files import check_pictures, pictures
from fastcoll.errors import UsageError


def test_a_picture_without_an_ending_is_two():
    assert [str(path) for path in pictures([Path("a/out"), Path("b.pdf")])] == [
        "a/out.png",
        "a/out.svg",
        "b.pdf",
    ]


def test_looking_whether_a_picture_can_be_written_leaves_nothing(tmp_path):
    check_pictures([tmp_path / "out.png"])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError, match="must end in"):
        check_pictures([tmp_path / "out.doc"])
