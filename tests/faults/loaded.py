"""The modules that the fork server preloads, so that ranks of the tests in this folder need not load them."""

from __future__ import annotations

import gc

import numpy as np

import fastcoll.hybrid.backend
import fastcoll.net.tcp.entries
import fastcoll.rendezvous.methods
import fastcoll.shm.backend
import fastcoll.store.tcp_store
from fastcoll import ReduceOp
from fastcoll.kernels.reduce import reducer

for entry in (*fastcoll.shm.backend.ENTRIES, *fastcoll.net.tcp.entries.ENTRIES):
    entry.compile()
for dtype in ("f4", "f8"):
    reducer(ReduceOp.SUM, np.dtype(dtype))
gc.freeze()  # so that garbage collections in the children do not touch, and so copy, these objects
