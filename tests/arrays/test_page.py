"""The page about other libraries' arrays: each of its blocks runs where the library is installed."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import fastcoll as dist

PAGE = (Path(__file__).parents[2] / "docs" / "arrays.md").read_text()
BLOCKS = {
    re.match(r"import (\w+)", block)[1]: block
    for block in re.findall(r"^```py\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
}


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("library", BLOCKS)
def test_the_block_of_a_library_runs(library: str) -> None:
    pytest.importorskip(library, reason=f"pip install {library}")
    exec(compile(BLOCKS[library], "arrays.md", "exec"), {"np": np, "dist": dist})


def test_every_library_has_a_block() -> None:
    assert set(BLOCKS) == {"torch", "jax", "pandas", "pyarrow"}
