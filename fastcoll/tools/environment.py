"""`python -m fastcoll env`: show what a program would find in its environment if it were started like this command.

The command starts no process and opens no connection. To see the environment of a job's ranks, start this command in
place of the program: `mpirun -n 2 python -m fastcoll env`. The secret is never shown.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from .. import config
from .._version import __version__
from ..errors import UsageError
from ..rendezvous import attempts, detect
from ..rendezvous.detect import Detected, LauncherVariables
from .printing import Printer

_SECRET = "FASTCOLL_SECRET"
_OTHERS = {
    "NUMBA_CACHE_DIR": "where compiled code is kept",
    "GLOO_SOCKET_IFNAME": "network interfaces, if FASTCOLL_SOCKET_IFNAME is not set",
    "XDG_CONFIG_HOME": "the folder with fastcoll/tuning.json and fastcoll/secret, instead of ~/.config",
    "XDG_CACHE_HOME": "the folder with compiled code, instead of ~/.cache, if NUMBA_CACHE_DIR is not set",
    "CUDA_VISIBLE_DEVICES": "the GPUs that this process sees",
    "NO_COLOR": "these commands print without colours",
}
_TORCHRUN = "TORCHELASTIC_RUN_ID"
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_SHELLS = ("bash", "interactive")


class SettingInForce(NamedTuple):
    """The value of a setting as text, its source, and its meaning."""

    name: str
    value: str
    source: str
    meaning: str
    wrong: str = ""  # why the variable's text cannot be used


class Launched(NamedTuple):
    """The launcher that was detected, and what `init_process_group()` derives from it."""

    facts: tuple[tuple[str, str, str], ...]  # each has a name, a value, and why the value is so
    wrong: str = ""  # why `init_process_group()` would refuse the environment


def main(words: Sequence[str] | None = None) -> int:
    """Run the command; return 1 if `init_process_group()` would refuse this environment."""
    parser = argparse.ArgumentParser(
        prog="python -m fastcoll env",
        description="Show which launcher was detected and why, where the ranks would meet, and the settings in force.",
        epilog="exit code: 1 if init_process_group() would refuse this environment, else 0.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")
    given = parser.parse_args(words)
    launched, settings = launched_by(os.environ), settings_of(os.environ)
    others = [(name, os.environ[name], about) for name, about in _OTHERS.items() if name in os.environ]
    show = Printer()
    if given.json:
        show.json(
            {
                "fastcoll": __version__,
                "detected": {what: {"value": value, "why": why} for what, value, why in launched.facts},
                "wrong": [why for why in (launched.wrong, *(each.wrong for each in settings)) if why],
                "settings": {each.name: {"value": each.value, "from": each.source} for each in settings},
                "other_variables": {name: value for name, value, _ in others},
            }
        )
    else:
        python = ("Python", ".".join(map(str, sys.version_info[:3])), sys.executable)
        package = ("fastcoll", __version__, f"{Path(__file__).parents[1]}")
        show.table(("what", "value", "why"), [*launched.facts, package, python])
        if launched.wrong:
            show.say(f"init_process_group() refuses this: {launched.wrong}", "bad")
        show.say()
        rows = [(each.name, each.value, each.source, each.wrong or each.meaning) for each in settings]
        rows += [(name, value, "environment", about) for name, value, about in others]
        wrong = {each.wrong for each in settings}
        styles = ["bad" if row[3] in wrong else "" if row[2] == "default" else "bold" for row in rows]
        show.table(("setting", "value", "from", "meaning"), rows, styles)
    return 1 if launched.wrong or any(each.wrong for each in settings) else 0


# ---- the launcher ------------------------------------------------------------------------------------------


def launched_by(environ: Mapping[str, str]) -> Launched:
    """Return what `init_process_group()` derives from launchers' variables, and which variables it ignores."""
    sources = [
        (source, _set(source, environ)) for source in (detect.TORCH, *detect.MPI_SOURCES, detect.SLURM)
    ]
    passed_over: list[tuple[str, str, str]] = []
    try:
        detected = detect.detect(environ)
    except UsageError as error:
        variables = tuple((source.name, ", ".join(names), "is set") for source, names in sources if names)
        return Launched((("launcher", "unclear", "see below"), *variables), str(error))
    counted = detected.source.split(", ")
    for source, names in sources:
        if names and source.name not in counted:
            passed_over.append(("ignored", source.name, _why_not(source, environ, detected)))
    facts = [("launcher", _launcher(detected, environ), _why(detected, environ, sources))]
    if detected.rank is not None or detected.world_size is not None:
        local = "of the ranks on this machine"
        numbers = [
            ("rank", detected.rank, detected.rank_variable),
            (
                "world size",
                detected.world_size,
                "all of them on this machine" if detected.on_one_node else "",
            ),
            ("local rank", detected.local_rank, local),
            ("local world size", detected.local_size, local),
        ]
        facts += [(what, str(value), why) for what, value, why in numbers if value is not None]
    facts += passed_over
    try:
        return Launched((*facts, _meeting(detected)))
    except UsageError as error:
        return Launched(tuple(facts), str(error))


def _set(source: LauncherVariables, environ: Mapping[str, str]) -> list[str]:
    """Return the variables of a launcher that are set, each as NAME=VALUE."""
    names = (source.rank, source.size, source.local_rank, source.local_size)
    return [f"{name}={environ[name]}" for name in names if environ.get(name)]


def _launcher(detected: Detected, environ: Mapping[str, str]) -> str:
    """Return the launcher's name."""
    if not detected.source:
        return "none"
    is_torchs = _TORCHRUN in environ and environ.get(_AGENT_STORE) != "False"  # fastcoll.launch sets False
    by_torch = "torchrun" if is_torchs else "fastcoll.launch, or by hand"
    return detected.source.replace(detect.TORCH.name, by_torch)


def _why(
    detected: Detected, environ: Mapping[str, str], sources: Sequence[tuple[LauncherVariables, list[str]]]
) -> str:
    if not detected.source:
        asked = [detect.TORCH, *detect.MPI_SOURCES, detect.SLURM]
        return f"none of {', '.join(source.rank for source in asked)} is set"
    names = [
        name for source, found in sources if source.name in detected.source.split(", ") for name in found
    ]
    return ", ".join(names)


def _why_not(source: LauncherVariables, environ: Mapping[str, str], detected: Detected) -> str:
    """Return why a launcher's variables are ignored although some are set."""
    found = ", ".join(_set(source, environ))
    if source is not detect.SLURM:
        return f"{found}: an agent that this launcher started has set LOCAL_WORLD_SIZE, and counts instead"
    if detected.rank is not None:
        return f"{found}: Slurm, the outermost launcher, counts only if no other launcher has set variables"
    if environ.get("SLURM_JOB_NAME") in _SHELLS:
        return f"{found}: this is a shell in an allocation, not a task that srun has started"
    return f"{found}: a task that srun has started has both {source.rank} and {source.size}"


def _meeting(detected: Detected) -> tuple[str, str, str]:
    """Return the fact (of `Launched`) where `init_process_group()` meets the other ranks; raise its UsageError."""
    from ..rendezvous.methods import place_of  # imported here, because it imports sockets

    meeting = place_of(detected)
    if meeting.world_size == 1:
        return (
            "meets",
            "no other rank",
            "this is a world of one; several: python -m fastcoll launch -n 4 script.py",
        )
    if meeting.path:
        return "meets", meeting.path, "a file, as all ranks are on this machine and MASTER_PORT is not set"
    beside = detect.port_beside(meeting.port)
    named = (
        "MASTER_ADDR"
        if detected.master_addr is not None and "MASTER_ADDR" in detected.found
        else "the launcher"
    )
    ported = (
        "MASTER_PORT"
        if detected.master_port is not None
        else f"derived from the job's name, {detected.job_id}"
    )
    who = "rank 0, this one, listens there" if meeting.rank == 0 else "rank 0 listens there"
    why = f"{who}; host from {named}, port beside {meeting.port} ({ported})"
    return "meets", f"{meeting.host}:{beside}", why


# ---- the settings ------------------------------------------------------------------------------------------


def settings_of(environ: Mapping[str, str]) -> list[SettingInForce]:
    """Return every setting of fastcoll, and every FASTCOLL_ variable that is not a setting."""
    found = [_setting(name, setting, environ) for name, setting in config.SETTINGS.items()]
    for name, cure in config.unknown(environ).items():
        value = _hidden(environ[name]) if "SECRET" in name + cure else environ[name]
        found.append(SettingInForce(name, value, "environment", f"no setting of fastcoll; {cure}"))
    return found


def _setting(name: str, setting: config.Setting, environ: Mapping[str, str]) -> SettingInForce:
    text = environ.get(name)
    if text is None:
        return SettingInForce(name, _shown(setting.default), "default", setting.meaning)
    if name == _SECRET:
        return SettingInForce(name, _hidden(text), "environment", setting.meaning)
    try:
        value = _shown(setting.parse(text))
        if name == "FASTCOLL_PLACE" and text:
            attempts.place_of(text)
        if name == "FASTCOLL_JOINER" and text == "1" and not environ.get("FASTCOLL_ELASTIC"):
            raise UsageError("the launcher also sets FASTCOLL_ELASTIC, which is not set: unset it")
        return SettingInForce(name, value, "environment", setting.meaning)
    except ValueError as error:
        return SettingInForce(
            name, text, "environment", setting.meaning, f"cannot be used ({error}); {setting.meaning}"
        )


def _hidden(secret: str) -> str:
    return f"({len(secret)} characters)"


def _shown(value: object) -> str:
    if isinstance(value, range):
        return f"{value[0]}-{value[-1]}"
    return f"{value:g}" if isinstance(value, float) else str(value) or "(empty)"
