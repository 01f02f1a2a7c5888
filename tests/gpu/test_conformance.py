"""The conformance suite with arrays on a fake GPU (on_fakes.py)."""

from __future__ import annotations

import pytest
from results import results_in

from .simulator import passed


@pytest.mark.limit(900)  # a cold cache on a busy machine
@pytest.mark.long  # test_staged.py and test_several.py have the tests of GPUs only
def test_staging_passes_the_conformance_suite() -> None:
    # Left out for time, but for both_calls: in a group's first call the others see the agreement that it begins with.
    # Strided outputs on a GPU are not compared with one another, and sends from one are complete once they are staged.
    left_out = "pairs ctrl_c public both_calls share_memory test_objects".split()
    chosen = " and not ".join(["(n2", *left_out]) + ") or simulated"
    suite = ("conformance", "gpu/test_several.py")
    assert passed("-p", "gpu.on_fakes", *results_in("simulated"), "-k", chosen, *suite) > 90
