"""Command lines that are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs `main(words)`, which must end with exit code 2, and returns what it says."""

    def refused(main: Callable[[list[str]], Any], words: list[str]) -> str:
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2
        return capsys.readouterr().err

    return refused
