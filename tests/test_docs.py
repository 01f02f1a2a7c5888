"""The documentation: its code runs, its lists are complete, and its links lead somewhere.

- The ```python blocks of a page are programs of two ranks, except on the pages that SPECIAL names. A program begins
  with each block that imports fastcoll.
- The ```py blocks of a page run in two ranks as well, where the libraries that they import are installed. A block
  does not run if the comment "# needs ..." is on its first line (a GPU, several hosts, a framework).
- The blocks ```py title="examples/NAME.py" are lines of that program.
"""

import inspect
import os
import re
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from versus.options import main as versus

import fastcoll
from fastcoll import config, errors
from fastcoll.bench.command import main as bench
from fastcoll.launch.command import main as launch

ROOT = Path(__file__).parent.parent
PAGES = {path.name: path for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]}
SPECIAL = ("README.md", "elastic.md", "running.md", "testing.md")
IN_NEW_PROCESSES = ("running.md", "pytorch.md", "debugging.md")
REFERENCE = ("operations.md", "debugging.md")
MOST_LINES = {"README.md": 110, "CHANGELOG.md": 1000}


@cache
def text(page):
    return PAGES[page].read_text()


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text(page), re.MULTILINE | re.DOTALL)


def programs(page):
    """Return the programs of a page: one begins with each ```python block that imports fastcoll."""
    found = []
    for block in blocks(page, "python"):
        if not found or re.search(r"^(import|from) fastcoll\b", block, re.MULTILINE):
            found.append([])
        found[-1].append(block)
    return list(map("\n\n".join, found))


def prose(page):
    return re.sub(r"^```.*?^```$", "", text(page), flags=re.MULTILINE | re.DOTALL)


def run(*words, cwd, env=None):
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=250, cwd=cwd, env=env
    )


def is_heavy(code):
    """Return whether code imports what takes seconds to import, or to compile."""
    return bool(re.search(r"^\s*(import|from) (jax|numba|torch)\b", code, re.MULTILINE))


IN_RANKS = [
    pytest.param(page, heavy, id=f"{page}, heavy" if heavy else page, marks=[pytest.mark.long] * heavy)
    for page in sorted(PAGES)
    for heavy in (False, True)  # the heavy ones: tests/arrays, callers, rpc and with_jax have most of it
    if page not in SPECIAL and heavy in map(is_heavy, programs(page))
]


@pytest.mark.limit(700)
@pytest.mark.ranks(2, init=False, timeout=600)  # a page may compile what it shows
@pytest.mark.parametrize(("page", "heavy"), IN_RANKS)
def test_the_blocks_of_a_page_are_programs(page, heavy):
    assert "python -m fastcoll.launch -n 2 " in text(page).partition("```python")[0]
    for program in programs(page):
        if is_heavy(program) == heavy:
            exec(compile(program, page, "exec"), {"__name__": "__main__"})
            assert not fastcoll.is_initialized()


EXCERPTS = [
    (page, path, lines)
    for page in sorted(PAGES)
    for path, lines in re.findall(r'^```py title="(.*?)"\n(.*?)^```$', text(page), re.MULTILINE | re.DOTALL)
]


@pytest.mark.parametrize(("page", "path", "lines"), EXCERPTS)
def test_a_block_with_a_title_has_lines_of_that_program(page, path, lines):
    assert unindented(lines) in unindented((ROOT / path).read_text())
    assert f"](../{path})" in text(page)


def runnable(page):
    """Return the ```py blocks of a page that need nothing but Python libraries."""
    return [block for block in blocks(page, "py") if "# needs " not in block.splitlines()[0]]


@pytest.mark.limit(700)
@pytest.mark.ranks(2, init=False, timeout=600)
@pytest.mark.filterwarnings("ignore::UserWarning")  # of pandas and JAX
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.long] * any(map(is_heavy, runnable(page))))
        for page in sorted(PAGES.keys() - set(IN_NEW_PROCESSES))
        if runnable(page)
    ],
)
def test_other_blocks_run_where_their_libraries_are_installed(page):
    missing, names = [], {"np": np, "dist": fastcoll}
    if not any("init_process_group" in block for block in runnable(page)):
        fastcoll.init_process_group()
    for block in runnable(page):
        libraries = re.findall(r"^import (torch|jax|pandas|pyarrow)\b", block, re.MULTILINE)
        missing += [library for library in libraries if find_spec(library) is None]
        if not missing:
            exec(compile(block, page, "exec"), names)
    fastcoll.destroy_process_group()
    if missing:
        pytest.skip(f"pip install {' '.join(missing)}")


@pytest.mark.long  # tests/pytorch has all of it
def test_the_blocks_about_torch(tmp_path):
    pytest.importorskip("torch.distributed", reason="pip install torch")
    (tmp_path / "program.py").write_text("\n\n".join(runnable("pytorch.md")))
    done = run("-m", "fastcoll.launch", "-n", "2", "program.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_programs_that_are_started_otherwise_print_what_is_shown(tmp_path):
    command, shown = blocks("README.md", "console")[1].split("\n", 1)
    for name, code, words, expected in (
        ("hello.py", programs("README.md")[0], command.removeprefix("$ python ").split(), shown),
        ("running.py", runnable("running.md")[0], ["running.py"], "[0] in the ranks\n[1] in the ranks\n"),
        ("spawning.py", programs("running.md")[0], ["spawning.py"], "both ranks have ended well\n"),
    ):
        (tmp_path / name).write_text(code)
        done = run(*words, cwd=tmp_path)
        assert sorted(done.stdout.splitlines()) == expected.splitlines(), (name, done.stderr)


@pytest.mark.long  # three ranks wait for their timeout
def test_the_trace_that_is_shown(tmp_path):
    (tmp_path / "train.py").write_text(runnable("debugging.md")[0])
    environment = {**os.environ, "FASTCOLL_TRACE_DIR": "traces", "FASTCOLL_TRACE_SITES": "1"}
    assert run("-m", "fastcoll.launch", "-n", "4", "train.py", cwd=tmp_path, env=environment).returncode == 1
    found = " ".join(run("-m", "fastcoll", "trace", "traces", cwd=tmp_path).stdout.split())
    (shown,) = blocks("debugging.md", "text")
    for sentence in re.findall(r"Ranks 0.*?came\.|it is in load.*?\)\.", " ".join(shown.split())):
        assert re.sub(r"/tmp/train.py", str(tmp_path / "train.py"), sentence) in found, found


def unindented(code):
    return "".join(f"{line.strip()}\n" for line in code.splitlines() if line.strip())


@pytest.mark.long
def test_the_tests_that_are_shown_pass(tmp_path):
    (tmp_path / "test_shown.py").write_text("\n\n".join(blocks("testing.md", "python")))
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", cwd=tmp_path)
    assert " passed" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0, done.stdout


def test_every_public_name_is_in_the_reference():
    words = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", "".join(map(prose, REFERENCE))))))
    assert sorted(set(fastcoll.__all__) - words) == []


FUNCTIONS = {
    name: function for name in fastcoll.__all__ if inspect.isfunction(function := getattr(fastcoll, name))
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_help_explains_every_argument(name):
    explained = inspect.getdoc(FUNCTIONS[name])
    parameters = inspect.signature(FUNCTIONS[name]).parameters
    assert [p for p in parameters if not re.search(rf"\b{p}\b", explained)] == []
    room = FUNCTIONS[name].__module__.removeprefix("fastcoll.api.")
    as_another = re.search(r"errors: as for `all_\w+`", explained)
    if room in ("collectives", "p2p", "objects", "multigpu") and not as_another:
        assert re.search(r"^Raises:\n    UsageError: ", explained, re.MULTILINE)
        assert re.search(r"^    GroupError: ", explained, re.MULTILINE)


def test_names_that_only_torch_has_are_listed():
    torch = pytest.importorskip("torch.distributed", exc_type=ImportError)
    theirs = {
        name for name, thing in vars(torch).items() if type(thing) is not type(torch) and name[0] != "_"
    }
    listed = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", prose("porting.md")))))
    assert theirs - {"config", "log", "timedelta"} - set(fastcoll.__all__) - listed == set()


def test_names_listed_as_missing_are_missing():
    rows = text("porting.md").partition("## What is missing")[2].partition("\n## ")[0]
    cells = " ".join(re.findall(r"^\| (`.*?) \|", rows, re.MULTILINE))
    listed = re.findall(r"`(\w+)`", cells)
    assert len(listed) > 20
    assert sorted(set(listed) & set(fastcoll.__all__)) == []


def test_names_listed_as_equivalents_exist():
    kinds = {"dist": fastcoll, "elastic": fastcoll.elastic, "rpc": fastcoll.rpc, "work": fastcoll.Work}
    kinds |= {"reducer": fastcoll.GradientReducer, "ReduceOp": fastcoll.ReduceOp}
    cells = " ".join(re.findall(r"`([^`]+)`", text("porting.md").partition("\n## mpi4py\n")[2]))
    listed = set(re.findall(rf"(?<![\w.])({'|'.join(kinds)})\.(\w+)", cells))
    assert len(listed) > 50
    assert [f"{kind}.{name}" for kind, name in listed if not hasattr(kinds[kind], name)] == []


def test_the_table_of_settings():
    rows = re.findall(r"^\| `(FASTCOLL_\w+)` \| (.*?) \| (.*?) \|$", text("install.md"), re.MULTILINE)
    assert rows == [(name, str(s.default) or "(empty)", s.meaning) for name, s in config.SETTINGS.items()]
    mentioned = {name for page in PAGES for name in re.findall(r"FASTCOLL_[A-Z_]*[A-Z]", text(page))}
    assert mentioned - set(config.SETTINGS) == config.OF_THE_BUILD


def test_the_table_of_exceptions():
    rows = dict(re.findall(r"^\| `(\w+Error)` \| (.*?) \| .* \|$", text("debugging.md"), re.MULTILINE))
    tree = {
        name: ", ".join(base.__name__ for base in kind.__bases__)
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.FastcollError)
    }
    assert rows == tree


@pytest.mark.parametrize(
    ("page", "command"), [("running.md", launch), ("tuning.md", bench), ("tuning.md", versus)]
)
def test_every_option_is_described(page, command, capsys):
    with pytest.raises(SystemExit):
        command(["--help"])
    options = {found.replace("-", "_") for found in re.findall(r"--(\w[\w-]+)", capsys.readouterr().out)}
    described = {found.replace("-", "_") for found in re.findall(r"--(\w[\w-]+)", prose(page))}
    assert options - described <= {"help"}


@pytest.mark.parametrize("page", sorted(PAGES))
def test_a_page_is_short_and_its_links_lead_somewhere(page):
    assert len(text(page).splitlines()) <= MOST_LINES.get(page, 320)
    assert "fastcoll[" not in text(page), "install lines work from a checkout"
    for target in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", prose(page)):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        path = PAGES[page].parent / name if name else PAGES[page]
        assert path.exists(), f"{page}: {target}"
        assert not anchor or anchor in anchors(path), f"{page}: {target}"


def anchors(path):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text(path.name), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
