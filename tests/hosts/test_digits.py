"""The digits example on four hosts of two ranks each learns the same as one process."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hosts.network import Network
from hosts.nodes import SECRET, finish, launched, output_of

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "digits.py")


@pytest.mark.long  # test_launch.py has ranks of four hosts meet and reduce
def test_digits_learns_the_same_on_four_hosts(join_hosts: Callable[..., Network], tmp_path: Path) -> None:
    network = join_hosts(4, own_pids=True)
    with launched(network, 2, [EXAMPLE, "--save", str(tmp_path / "four.npy")], env=SECRET) as nodes:
        finish(nodes)
        assert [node.code for node in nodes] == [0] * 4, output_of(nodes)
        accuracy = re.search(r"\[0\] 8 ranks: test accuracy ([\d.]+)%", nodes[0].out)
        assert accuracy, output_of(nodes)
        assert float(accuracy[1]) > 95
    alone = [sys.executable, EXAMPLE, "--save", str(tmp_path / "one.npy")]
    subprocess.run(alone, check=True, capture_output=True, timeout=600)
    four, one = np.load(tmp_path / "four.npy"), np.load(tmp_path / "one.npy")
    np.testing.assert_allclose(four, one, rtol=0, atol=1e-5)
