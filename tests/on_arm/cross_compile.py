"""Compile fastcoll's kernels for another processor: `cross_compile.py TARGET.json [OPTIONS OF THE WARM-UP]`.

describe_target.py writes TARGET.json. Compiling takes some 15 times as long in an emulator as here, and LLVM makes the
same instructions: of the two kernels that were compiled in both places (`barrier` and `seize`), only names of functions
differed. The code is not loaded here. Python's minor version, and the versions of Numba, llvmlite and NumPy, must be
the target's.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def compile_for(target: dict[str, str], options: list[str]) -> int:
    here = os.uname()
    # fastcoll asks for the processor when it is imported.
    os.uname = lambda: os.uname_result((*here[:4], target["machine"]))
    import llvmlite.binding as llvm
    from numba.core import config

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    llvm.get_process_triple = lambda: target["triple"]
    config.CPU_NAME, config.CPU_FEATURES = target["cpu"], target["features"]
    from fastcoll import warmup
    from fastcoll.compiler import cache, machine_code

    assert target["sources"] == cache.SOURCES, "the target has other sources"
    cache._platform = lambda: bytes.fromhex(target["platform"])
    cache.load = lambda file: [1 for _ in machine_code._Object(file).functions()]
    return warmup.main(options)


if __name__ == "__main__":
    sys.exit(compile_for(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2:]))
