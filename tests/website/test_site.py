"""The site: it builds without a warning, has every public name, and works in a browser without another host."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fastcoll
from fastcoll.config import SETTINGS
from fastcoll.tools.command import COMMANDS

ROOT = Path(__file__).parents[2]
LIMIT = 60.0
_MISSING = [name for name in ("mkdocs", "material", "mkdocstrings", "selenium") if find_spec(name) is None]
pytestmark = [
    pytest.mark.limit(300),
    pytest.mark.skipif(
        bool(_MISSING),
        reason=f"the site's tools are not installed: pip install '.[docs]' selenium ({_MISSING})",
    ),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site; a warning fails the build."""
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return folder


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Serve the site on a free port of loopback."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def public(module: ModuleType) -> list[str]:
    names = [name for name in module.__all__ if not isinstance(getattr(module, name), ModuleType)]
    return [f"{module.__name__}.{name}" for name in names]


def test_the_reference_has_every_public_name(site: Path) -> None:
    text = "".join(page.read_text() for page in (site / "reference").rglob("*.html"))
    modules = ["fastcoll.rpc", "fastcoll.elastic", "fastcoll.symmetric"]
    names = [name for module in [fastcoll, *map(import_module, modules)] for name in public(module)]
    assert len(names) > 140
    assert [name for name in names if f'id="{name}"' not in text] == []
    assert [name for name in [*SETTINGS, *COMMANDS] if name not in text] == []


@pytest.mark.parametrize(
    ("words", "place"),
    [
        ("all_reduce", "reference/collectives/#fastcoll.all_reduce"),
        ("checkpoint", "faq/#how-do-i-write-a-checkpoint"),
        ("profile a healthy job", "faq/#how-do-i-profile-a-healthy-job"),
        ("pin cores", "faq/#how-do-i-pin-ranks-to-cores"),
        ("upgrade", "faq/#how-do-i-upgrade"),
        ("What does PREMUL_SUM do?", "faq/#what-does-premul_sum-do"),
        ("memory a rank", "faq/#how-much-memory-does-a-rank-take"),
        ("/dev/shm in Docker", "faq/#does-it-work-in-docker"),
        ("MPI_Allreduce", "porting/#mpi4py"),
        ("job hangs", "faq/#my-job-hangs-which-rank-is-at-fault"),
    ],
)
def test_a_question_finds_its_answer_first(address: str, browser: Any, words: str, place: str) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get(address)
    WebDriverWait(browser, LIMIT).until(
        lambda _: browser.find_element(By.CSS_SELECTOR, "input.md-search__input").is_displayed()
    )
    browser.find_element(By.CSS_SELECTOR, "input.md-search__input").send_keys(words)

    def first() -> str | None:
        # In one step, because the results change with each letter.
        link = "document.querySelector(\"li:first-child > a.md-search-result__link[href*='#']\")"
        href = browser.execute_script(f"return {link}?.href")
        return None if href is None else re.sub(r"\?h=[^#]*", "", href)

    WebDriverWait(browser, LIMIT).until(lambda _: first() == address + place)


def test_a_search_leads_to_the_reference(address: str, browser: Any) -> None:
    from selenium.common.exceptions import StaleElementReferenceException
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    def first(selector: str, do: Callable[[Any], object] = lambda _: None) -> Any:
        def found(_: Any) -> Any:
            for each in browser.find_elements(By.CSS_SELECTOR, selector):
                if each.is_displayed():
                    do(each)
                    return each

        # The results change with each letter.
        gone = [StaleElementReferenceException]
        return WebDriverWait(browser, LIMIT, ignored_exceptions=gone).until(found)

    browser.get(address)
    first("input.md-search__input").send_keys("all_reduce")
    first("a.md-search-result__link[href*='reference/collectives/']", lambda link: link.click())
    WebDriverWait(browser, LIMIT).until(lambda _: "reference/collectives/" in browser.current_url)
    first("a.md-nav__link[href$='#fastcoll.all_reduce']", lambda link: link.click())
    WebDriverWait(browser, LIMIT).until(lambda _: browser.current_url.endswith("#fastcoll.all_reduce"))
    assert first("h2[id='fastcoll.all_reduce']").text.startswith("all_reduce")
    assert [each for each in browser.get_log("browser") if each["level"] == "SEVERE"] == []
    loaded = browser.execute_script("return performance.getEntriesByType('resource').map(each => each.name)")
    assert loaded
    assert [name for name in loaded if not name.startswith(address)] == []
