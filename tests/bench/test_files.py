"""The files that a run writes."""

import pytest

from fastcoll.bench.command import pictures
from fastcoll.errors import UsageError


def test_a_picture_without_an_extension_is_two_files(tmp_path):
    assert [path.name for path in pictures([tmp_path / "out", tmp_path / "b.pdf"])] == [
        "out.png",
        "out.svg",
        "b.pdf",
    ]


def test_the_check_whether_a_picture_can_be_written_leaves_nothing(tmp_path):
    pictures([tmp_path / "out.png"])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError, match="must end in"):
        pictures([tmp_path / "out.doc"])
