"""Sampler: choose each rank's samples of an epoch, even if the number of ranks changes."""

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
    """Divides each epoch into steps of `batch` samples, and each step into shares for the ranks.

    The samples of a step depend on `seed` and the epoch alone, and the shares of all ranks make up the step. So even if
    the number of ranks changes, each sample is taken once in an epoch, and in the same step. Put the sampler into the
    `State`, so that a restart continues after the last committed step.

    Args:
        n: the number of samples.
        batch: the number of samples in a step, over all ranks; the last step of an epoch may have fewer.
        shuffle: whether each epoch has a new random order; False: the order is 0 to n - 1.
        seed: the seed of the random orders, 0 or more, the same on all ranks; `run` gives all ranks that of rank 0.

    Attributes:
        epoch: the current epoch, from 0.
        position: how many samples of the epoch the steps have taken so far.
        count: the number of samples in the current step, over all ranks: the divisor for averages over the step.

    Raises:
        UsageError: `n` or `batch` is not positive, or `seed` is negative.

    Examples:
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
        if self._seed < 0:
            raise UsageError(f"seed is {seed}; give 0 or more")
        self.epoch = self.position = self.count = 0

    def __iter__(self) -> Iterator[Indices]:
        """Yield this rank's indices in each remaining step of the epoch, then begin the next epoch.

        A rank's share of a step may be empty. A step counts as taken as soon as it is yielded, so commit only after
        its result is in the state. Do not give the sampler to a torch DataLoader with workers, which takes steps ahead.
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
        """Return the epoch, the position and what determines the order; `load_state_dict` compares `n` and `batch`."""
        order = {"n": self._n, "batch": self._batch, "shuffle": self._shuffle, "seed": self._seed}
        return order | {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the epoch and position in a `state_dict`, in its order of samples.

        Raises:
            UsageError: the `state_dict` comes from a sampler with another number of samples or another batch.
        """
        if (state["n"], state["batch"]) != (self._n, self._batch):
            raise UsageError(
                f"a sampler of {self._n} samples in steps of {self._batch} cannot load the state of a sampler of "
                f"{state['n']} samples in steps of {state['batch']}"
            )
        self._shuffle, self._seed = state.get("shuffle", self._shuffle), state.get("seed", self._seed)
        self.epoch, self.position = state["epoch"], state["position"]
