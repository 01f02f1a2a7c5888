"""What a release uploads: the source distribution and the wheel, built from the files of the checkout.

`docs/releasing.md` runs the tests that are in the source distribution.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path
from zipfile import ZipFile

import pytest

from fastcoll import __version__
from fastcoll.supported import TESTED

pytestmark = pytest.mark.long
ROOT = Path(__file__).parent.parent
OF_THE_CHECKOUT_ALONE = (".ci/", ".github/", ".gitignore")
MADE = re.compile(r"PKG-INFO|setup\.cfg|fastcoll\.egg-info/.*")
URL = "https://forge.example/owner/fastcoll"


@pytest.fixture(scope="module")
def files() -> set[str]:
    """Return the files of this checkout that are in the repository, or will be with the next commit."""
    if not (ROOT / ".git").exists():
        pytest.skip("these sources are no checkout")
    # A checkout that another user made is only read.
    command = [
        "git",
        "-c",
        f"safe.directory={ROOT}",
        "ls-files",
        "--cached",
        "--others",
        "--exclude-standard",
    ]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {name for name in listed.splitlines() if (ROOT / name).exists()}


def python(*words: object, cwd: Path, **environ: str) -> None:
    """Run Python in `cwd`, without variables of a build but those that are given."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("FASTCOLL_BUILD_")}
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(
        command, cwd=cwd, env={**env, **environ}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def checkout(files: set[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the checkout, since builds leave files."""
    for needed in ("build", "twine"):
        pytest.importorskip(needed, reason="pip install '.[dev]'")
    copy: Path = tmp_path_factory.mktemp("checkout")
    for name in files:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def built(checkout: Path) -> Path:
    """Return the folder with a source distribution and a wheel that was built from that."""
    python("-m", "build", "--no-isolation", cwd=checkout)
    return checkout / "dist"


@pytest.fixture(scope="module")
def wheel(built: Path) -> dict[str, bytes]:
    return content(built)


def content(folder: Path) -> dict[str, bytes]:
    """Return the files of the wheel in a folder."""
    (wheel,) = folder.glob("*.whl")
    with ZipFile(wheel) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


def metadata(wheel: dict[str, bytes]) -> Message:
    return message_from_bytes(wheel[f"fastcoll-{__version__}.dist-info/METADATA"])


def test_the_source_distribution_has_what_its_tests_need_and_nothing_else(
    built: Path, files: set[str]
) -> None:
    with tarfile.open(built / f"fastcoll-{__version__}.tar.gz") as opened:
        names = {each.name.partition("/")[2] for each in opened.getmembers() if each.isfile()}
    assert {name for name in names if not MADE.fullmatch(name)} == {
        name for name in files if not name.startswith(OF_THE_CHECKOUT_ALONE)
    }


def test_the_wheel_has_the_package_alone(wheel: dict[str, bytes], files: set[str]) -> None:
    about = f"fastcoll-{__version__}.dist-info/"
    package = {name for name in files if name.startswith("fastcoll/")} | {"fastcoll_autoload.py"}
    assert {name for name in wheel if not name.startswith(about)} == package
    assert wheel[f"{about}licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()


def test_the_wheel_from_the_source_distribution_is_that_of_the_checkout(
    checkout: Path, wheel: dict[str, bytes]
) -> None:
    python("-m", "build", "--no-isolation", "--wheel", "--outdir", "direct", cwd=checkout)
    assert content(checkout / "direct") == wheel


def test_twine_accepts_both(built: Path) -> None:
    python("-m", "twine", "check", "--strict", *sorted(built.iterdir()), cwd=built)


def test_the_classifiers_name_the_tested_versions_of_python(wheel: dict[str, bytes]) -> None:
    (major, first), (_, last) = TESTED["Python"]
    named = [each for each in metadata(wheel).get_all("Classifier", []) if re.search(r" 3\.\d+$", each)]
    assert named == [f"Programming Language :: Python :: {major}.{minor}" for minor in range(first, last + 1)]


PICTURE = "docs/speed.png"


def relative_links(text: str) -> list[str]:
    return re.findall(r"\]\((?!https://)([^)\s]+)\)", text)


def test_the_description_has_no_relative_links(wheel: dict[str, bytes]) -> None:
    readme = (ROOT / "README.md").read_text()
    described = metadata(wheel).get_payload()
    assert len(relative_links(readme)) > 40
    assert relative_links(described) == []
    assert "[tour](" not in described
    assert "install, tour, run it" in described
    assert "![" not in described
    assert metadata(wheel).get_all("Project-URL") is None


def test_links_lead_to_the_repository_that_a_build_names(checkout: Path) -> None:
    hook = "import compiled_wheels; print(compiled_wheels.prepare_metadata_for_build_wheel('about'))"
    (checkout / "about").mkdir()
    python("-c", hook, cwd=checkout, PYTHONPATH="build_backend", FASTCOLL_BUILD_URL=f"{URL}/")
    (path,) = checkout.glob("about/*/METADATA")
    found = message_from_bytes(path.read_bytes())
    at = f"{URL}/blob/v{__version__}"
    links = re.findall(rf"\]\({at}/([^)\s]+)\)", found.get_payload())
    assert [*links, PICTURE] == sorted(relative_links((ROOT / "README.md").read_text()), key=PICTURE.__eq__)
    assert f"]({URL}/raw/v{__version__}/{PICTURE})" in found.get_payload()
    urls = dict(each.split(", ") for each in found.get_all("Project-URL", []))
    assert urls == {
        "Source": URL,
        "Documentation": f"{at}/README.md#documentation",
        "Changelog": f"{at}/CHANGELOG.md",
        "Issues": f"{URL}/issues",
    }
