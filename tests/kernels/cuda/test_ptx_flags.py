"""NVVM's code for words that processes share, and the driver's stream waits; without a GPU."""

from __future__ import annotations

import re

import pytest
from kernels.cuda.fake_driver import HOPPER, Library

from fastcoll.kernels.cuda.driver import CudaDriver


@pytest.fixture
def ptx(compiler):
    """Compile one of gpu/ipc's kernels."""
    from fastcoll.kernels.cuda import kernel as launch
    from fastcoll.kernels.cuda import steps as ipc

    def compile(name: str) -> str:
        kernel = getattr(ipc, name)
        return launch.compile_ptx(kernel, kernel.__code__.co_argcount, (), HOPPER)[0]

    return compile


def test_waits_poll_with_acquire_and_check_the_stop_word(ptx) -> None:
    for name in ("meet", "step"):
        text = ptx(name)
        # A loop: a label, the acquiring load after it, and a jump back.
        loops = re.findall(r"(\$L__BB\w+):(?:(?!\$L__BB\w+:).)*?ld\.acquire\.sys\.u64", text, re.S)
        assert any(re.search(rf"bra(?:\.uni)?\s+{re.escape(label)};", text) for label in loops)
        assert "nanosleep" in text
        assert text.count("bar.sync") == 2
        assert ".local ." not in text


def test_the_published_word_is_released_last(ptx) -> None:
    for name, relaxed in (("announce", 3), ("publish", 0)):
        text = ptx(name)
        stores = re.findall(r"st\.(\w+)\.sys\.u64", text)
        assert stores == ["relaxed"] * relaxed + ["release"]
        assert not re.search(r"\bst\.(global|volatile)", text)


class Waits(Library):
    """A driver whose streams can wait, on its first device."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[tuple[int, ...]] = []
        attribute = self.cuDeviceGetAttribute  # type: ignore[attr-defined]

        def ask(out, which, device):
            self.set(out, int(device == 0)) if which == 122 else attribute(out, which, device)

        self.define("cuDeviceGetAttribute", ask)
        self.define("cuStreamWaitValue64_v2", lambda *args: self.waits.append(args))


def test_streams_wait_for_words_where_the_device_can() -> None:
    library = Waits()
    driver = CudaDriver(library)
    assert driver.can_wait(0)
    assert not driver.can_wait(1)
    driver.wait_value(7, 0x1000, 5)
    assert library.waits == [(7, 0x1000, 5, 0)]


def test_a_driver_without_waits_has_none() -> None:
    assert not CudaDriver(Library()).can_wait(0)
