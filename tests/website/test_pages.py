"""The pages of `profile`, the benchmark and `trace` in a browser: no errors, no network, and every plot is drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastcoll
from fastcoll.bench import picture
from fastcoll.bench.results import Row, Run
from fastcoll.core import signature
from fastcoll.profiling.merging import RankLog, merge
from fastcoll.profiling.profile_page import write_html as write_profile
from fastcoll.record import call_log as log
from fastcoll.record.record import CallRecord, GroupRecord, MemberRecord, Record
from fastcoll.tools.dumps import Dump
from fastcoll.tools.trace_page import write_html as write_trace

_MISSING = [name for name in ("selenium", "plotly") if find_spec(name) is None]
pytestmark = [
    pytest.mark.limit(300),
    pytest.mark.skipif(
        bool(_MISSING),
        reason=f"the site's tools are not installed: pip install '.[docs]' selenium ({_MISSING})",
    ),
]
REDUCE = signature.encode("all_reduce", np.dtype(np.float32), op=fastcoll.ReduceOp.SUM)
MS = 1_000_000


def of_profile(path: Path) -> int:
    """Write the page of a profile; return the number of its plots."""
    logs = []
    for rank in range(2):
        rows = [
            (1, log.SYNC, k, REDUCE, 4096, (10 * k + 3 * rank) * MS, (10 * k + 5) * MS, -1)
            for k in range(1, 99)
        ]
        groups = [{"name": "WORLD", "ranks": [0, 1], "rank": rank}]
        about = {
            "rank": rank,
            "world_size": 2,
            "host": "<vm>",
            "pid": 7,
            "machine": "one",
            "began": 1,
            "epoch": 0,
        }
        about |= {"ended": 1000 * MS, "level": 0, "dropped": 0, "removed": [], "groups": groups}
        logs.append(RankLog(about, np.array(rows, np.int64)))
    write_profile(merge(logs), path)
    return 4


def of_benchmark(path: Path) -> int:
    row = Row("all_reduce", 64, 16, "float32", "sum", -1, 10, 2.0, 3.0, 1.0, 1.0, 0)
    rows = [
        replace(row, operation=name, size=64 << k) for name in ("all_reduce", "broadcast") for k in range(8)
    ]
    facts = {"fastcoll": "1", "cpu": "a CPU", "usable_cores": 2, "update_gbs": 10.0, "copy_gbs": 5.0}
    picture.write_html(path, Run("2030-01-02", [], "shm", facts, [{}, {}], rows), ["about it"])
    return 2


def of_trace(path: Path) -> int:
    members = tuple(MemberRecord(rank, "vm", 7 + rank) for rank in range(2))
    dumps = []
    for rank in range(2):
        ring = [CallRecord(k, REDUCE, 64, "done", 10 * k * MS, (10 * k + 5) * MS) for k in range(1, 30)]
        group = GroupRecord("WORLD", 1, "shm", rank, members, 29, 29, 0, tuple(ring), None, 0, -1, (), "")
        dumps.append(Dump(path, Record("job", rank, 2, "vm", 7 + rank, 1, 0.0, "1", (group,)), (), {}, 1.0))
    write_trace(path, dumps)
    return 1


@pytest.mark.parametrize("write", [of_profile, of_benchmark, of_trace])
def test_a_page_draws_its_plots_without_errors_and_without_a_network(
    write: Callable[[Path], int], browser: Any, tmp_path: Path
) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    count = write(tmp_path / "page.html")
    browser.get((tmp_path / "page.html").as_uri())
    drawn = "return [...document.querySelectorAll('.js-plotly-plot')].filter(each => each.querySelector('%s')).length"
    WebDriverWait(browser, 60).until(lambda _: browser.execute_script(drawn % ".main-svg") == count)
    marks = ".bars path, .scatterlayer path, .heatmaplayer image"
    assert browser.execute_script(drawn % marks) == count
    assert all(row.text for row in browser.find_elements(By.CSS_SELECTOR, "h2"))
    assert [each for each in browser.get_log("browser") if each["level"] == "SEVERE"] == []
    loaded = browser.execute_script("return performance.getEntriesByType('resource').map(each => each.name)")
    assert [name for name in loaded if not name.startswith(("data:", "blob:"))] == []
