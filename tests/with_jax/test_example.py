"""The example of logistic regression, run by the commands in its first lines."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "compiled" / "logistic_regression.py"


@pytest.mark.long  # test_calls.py tests derivatives through collectives
def test_logistic_regression_has_the_same_result_with_any_number_of_ranks(tmp_path):
    pytest.importorskip("jax", reason="pip install jax")
    weights = {}
    for ranks in (1, 3):
        file = tmp_path / f"{ranks}.npy"
        launch = ["-m", "fastcoll.launch", "-n", str(ranks)] if ranks > 1 else []
        done = subprocess.run(
            [sys.executable, *launch, str(EXAMPLE), "--save", str(file)],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        said = re.search(rf"{ranks} ranks: ([\d.]+)% right, loss 0.6931 to ([\d.]+)", done.stdout)
        assert said, done.stdout
        assert float(said[1]) > 90
        weights[ranks] = np.load(file)
    np.testing.assert_allclose(weights[3], weights[1], rtol=0, atol=1e-3)
