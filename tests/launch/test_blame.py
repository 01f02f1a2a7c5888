"""Telling failures apart that follow from another rank's."""

from __future__ import annotations

import traceback

import pytest

from fastcoll import errors
from fastcoll.launch.supervisor import follows


def last_lines(error: BaseException) -> str:
    return "a line of the program\n" + "".join(traceback.format_exception(error))


@pytest.mark.parametrize("kind", [errors.GroupError, *errors.GroupError.__subclasses__()])
def test_a_failed_group_follows(kind: type[errors.GroupError]) -> None:
    assert follows(last_lines(kind("rank 1 is gone")))


@pytest.mark.parametrize(
    "error", [ValueError("no data"), errors.UsageError("no"), RuntimeError("not fastcoll.errors.GroupError")]
)
def test_other_failures_do_not(error: Exception) -> None:
    assert not follows(last_lines(error))
    assert not follows("")
