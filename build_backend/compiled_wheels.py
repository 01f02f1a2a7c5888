"""The build backend: setuptools, and what two variables of the environment add to a build.

FASTCOLL_BUILD_LEVELS is `all`, `native` (the best level of this machine), or a list such as `x86-64-v3,x86-64-v4`. Then
the wheel is one for this version of Python and Linux on x86-64, and nothing of the package compiles at first use. If it
is not set, the wheel is for any platform, and functions compile at first use.

FASTCOLL_BUILD_URL is the address of the repository, such as https://github.com/OWNER/NAME. The metadata then has links
to it and to the files that README.md links to, and README.md's picture. If it is not set, the metadata has none of
these: the links are plain text.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  # the hooks that are not defined here
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.egg_info import egg_info
from setuptools.config.pyprojecttoml import load_file
from setuptools.errors import OptionError, PlatformError

LEVELS = "FASTCOLL_BUILD_LEVELS"
URL = "FASTCOLL_BUILD_URL"
# The oldest glibc whose functions the code calls is older than that of any Python that fastcoll supports.
PLATFORM = "manylinux_2_17_x86_64"
_RELATIVE_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?://|#)([^)\s]+)\)")
_RELATIVE_IMAGE = re.compile(r"!\[([^\]]*)\]\((?!https?://)([^)\s]+)\)\n*")


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """Return what a build needs; to compile, it needs what the package needs, and ml_dtypes for bfloat16."""
    needed: list[str] = build_meta.get_requires_for_build_wheel(config_settings)
    if _wanted():
        needed += [*load_file("pyproject.toml")["project"]["dependencies"], "ml_dtypes>=0.4"]
    return needed


class EggInfo(egg_info):
    """Describe the package by a README that is read outside of the repository; every build does this first."""

    def finalize_options(self) -> None:
        super().finalize_options()
        metadata, url = self.distribution.metadata, os.environ.get(URL, "").rstrip("/")
        files = f"{url}/blob/v{metadata.version}"
        text = _RELATIVE_IMAGE.sub(
            rf"![\1]({url}/raw/v{metadata.version}/\2)\n\n" if url else "", metadata.long_description
        )
        metadata.long_description = _RELATIVE_LINK.sub(rf"[\1]({files}/\2)" if url else r"\1", text)
        if url:
            metadata.project_urls = {
                "Source": url,
                "Documentation": f"{files}/README.md#documentation",
                "Changelog": f"{files}/CHANGELOG.md",
                "Issues": f"{url}/issues",
            }


class BuildPy(build_py):
    """Copy the sources and, if that is wanted, add machine code."""

    def run(self) -> None:
        package = Path(self.build_lib) / "fastcoll"
        shutil.rmtree(package / "_compiled", ignore_errors=True)  # that of an earlier build
        super().run()
        if _wanted() and not self.editable_mode:
            if sysconfig.get_platform() != "linux-x86_64":
                raise PlatformError(
                    f"{LEVELS} is for Linux on x86-64, and this is {sysconfig.get_platform()}"
                )
            _compile(package.resolve().parent)


class BdistWheel(bdist_wheel):
    """Name the platform of a wheel that has machine code."""

    def get_tag(self) -> tuple[str, str, str]:
        python = f"cp{sys.version_info.major}{sys.version_info.minor}"
        return (python, python, PLATFORM) if _wanted() else super().get_tag()


def _wanted() -> str:
    return os.environ.get(LEVELS, "")


def _compile(folder: Path) -> None:
    """Compile in processes that import the package from `folder`, as these have the settings of the target."""
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environ = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryDirectory() as elsewhere:
        command = [sys.executable, "-m", "fastcoll.shipping", *_wanted().split(",")]
        if subprocess.run(command, cwd=elsewhere, env=environ).returncode:
            raise OptionError(f"{LEVELS}={_wanted()}: machine code could not be made, see above")
