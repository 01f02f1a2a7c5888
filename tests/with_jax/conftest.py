"""Fixtures: JAX, and fastcoll.jax."""

from __future__ import annotations

import pytest


@pytest.fixture
def jax():
    return pytest.importorskip("jax", reason="pip install jax")


@pytest.fixture
def fj(jax):
    import fastcoll.jax

    return fastcoll.jax
