"""Sampler: which samples of an epoch each rank takes, however many ranks there are by then."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.operands import whole
from ..core.partition import shares
from ..errors import UsageError
from ..job.groups import get_rank, get_world_size, is_initialized

Indices = NDArray[np.int64]


class Sampler:
    """Cuts each epoch into steps of `batch` samples, and each step into a share for every rank.

    The steps follow from `seed` and the epoch alone, and the shares of all ranks make up the step. So with any number
    of ranks, and however often it changes, each sample is taken once in an epoch, in the same steps. It belongs into
    the `State`: a restart then goes on behind the last step that was committed.

    Args:
        n: the number of samples.
        batch: samples of a step, of all ranks together; the last step of an epoch takes what is left.
        shuffle: a new order in each epoch; False: 0 to n - 1.
        seed: of the orders; the same on all ranks.

    Attributes:
        epoch: the one under way, from 0.
        position: how many of its samples the steps so far have taken.
        count: samples of the step under way, of all ranks together: what sums over them are divided by.

    Raises:
        UsageError: `n` or `batch` is not positive.

    Example:
        >>> while state.sampler.epoch < 10:
        ...     for mine in state.sampler:
        ...         learn(x[mine])
        ...         state.commit()
    """

    def __init__(self, n: int, batch: int, shuffle: bool = True, seed: int = 0) -> None:
        self._n, self._batch = whole("n", n), whole("batch", batch)
        if min(self._n, self._batch) < 1:
            raise UsageError(f"n is {n} and batch is {batch}; give at least 1 of each")
        self._shuffle, self._seed = bool(shuffle), whole("seed", seed)
        self.epoch = self.position = self.count = 0

    def __iter__(self) -> Iterator[Indices]:
        """This rank's indices in each step that is left of the epoch, some perhaps empty; then the next epoch begins.

        The step counts as taken from the moment at which it is handed out, so commit when its work is in the state.
        """
        order = np.arange(self._n)
        if self._shuffle:
            order = np.random.default_rng([self._seed, self.epoch]).permutation(order)
        while self.position < self._n:
            step = order[self.position : self.position + self._batch]
            self.position += step.size
            self.count = step.size
            rank, size = (get_rank(), get_world_size()) if is_initialized() else (0, 1)
            yield shares(step, size)[rank]
        self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Where it is, and of what."""
        return {"n": self._n, "batch": self._batch, "epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was asked.

        Raises:
            UsageError: that was of a sampler with other samples or steps.
        """
        if (state["n"], state["batch"]) != (self._n, self._batch):
            raise UsageError(
                f"a sampler of {self._n} samples in steps of {self._batch} cannot go on where one of {state['n']} in "
                f"steps of {state['batch']} was"
            )
        self.epoch, self.position = state["epoch"], state["position"]
