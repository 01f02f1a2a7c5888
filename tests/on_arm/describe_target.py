"""Print, in JSON, for what cross_compile.py is to compile: the processor, and the key of the code in the cache."""

from __future__ import annotations

import json
import os

import llvmlite.binding as llvm
from numba.core.codegen import get_host_cpu_features

from fastcoll.compiler import cache

target = {
    "machine": os.uname().machine,
    "triple": llvm.get_process_triple(),
    "cpu": llvm.get_host_cpu_name(),
    "features": get_host_cpu_features(),
    "sources": cache.SOURCES,
    "platform": cache._platform().hex(),
}
print(json.dumps(target))
