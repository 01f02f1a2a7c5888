"""How the command line's words become values, with errors as argparse shows them."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

from ..errors import UsageError
from .cases import parse_dtype


def read(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """`parse` with its errors as argparse shows them."""

    def reader(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return reader


def listed(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Several values, separated by commas."""
    reader = read(parse)
    return lambda text: [reader(part) for part in text.split(",")]


def positive(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    """A number of this kind, finite and greater than 0."""

    def parse(text: str) -> Any:
        value = kind(text)
        if not 0 < value < math.inf:
            raise UsageError(f"{text} is not a finite number greater than 0")
        return value

    return read(parse)


def dtype_name(text: str) -> str:
    """NumPy's name for the dtype that `text` names."""
    return parse_dtype(text).name


def cores(text: str) -> list[int]:
    """Cores `a,b,...`; `none` for no pinning."""
    return [] if text == "none" else [read(int)(part) for part in text.split(",")]
