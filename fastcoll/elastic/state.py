"""State: the values from which training continues after the ranks have changed.

A commit keeps a copy of the values. After the ranks have changed, all ranks get the copy of one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..api.collectives import broadcast
from ..api.objects import broadcast_object_list
from ..core.operands import whole
from ..errors import UsageError
from ..job.groups import get_rank
from .copies import Tree, copied, with_buffers, without_arrays


class State:
    """Values that survive the death of ranks. They are attributes, which may be added and set at any time.

    A value has one of these kinds; dicts, lists and tuples of values of the first two kinds are allowed, too:
      - an array of NumPy or torch, which is copied in place, and broadcast;
      - an object that can be copied by `copy.deepcopy` and pickled, such as an array of another library;
      - an object with `state_dict` and `load_state_dict`: torch's modules and optimizers, a `Sampler`.

    Attributes that begin with an underscore are not part of the state. The initial values count as committed.

    Args:
        values: the attributes.

    Raises:
        UsageError: an attribute would hide a method.

    Examples:
        >>> state = elastic.State(weights=np.zeros(10), step=0)
        >>> state.step += 1
        >>> state.commit()
    """

    def __init__(self, **values: Any) -> None:
        if hidden := values.keys() & set(dir(State)):
            raise UsageError(
                f"a state's {', '.join(sorted(hidden))} is a method; give the value another name"
            )
        vars(self).update(values)
        self._at_commit: Callable[[], None] | None = None
        self._kept: dict[str, Tree] = {}
        self._keep()

    def __getattr__(self, name: str) -> Any:  # lets type checkers accept any attribute
        raise AttributeError(f"the state has no {name!r}; it has {', '.join(self._trees())}")

    def commit(self) -> None:
        """Keep a copy of the current values, from which training continues if a rank dies.

        Arrays are copied into memory that is reused. Under `run` all ranks must call this at the same points of the
        program. Joiners are admitted here; for this, each commit broadcasts 16 bytes if the job can have joiners.

        Raises:
            GroupError: a rank has died; the current values are kept nevertheless.
        """
        self._keep()
        if self._at_commit is not None:
            self._at_commit()

    def restore(self) -> None:
        """Set all values to those of the last commit, arrays in place; remove attributes that were added since."""
        trees, write = copied(self._kept, self._trees())
        write()
        self._put(trees)

    def sync(self, src: int = 0) -> None:
        """Set the values of all ranks to those of rank `src`, and commit them; collective. Arrays are set in place.

        Args:
            src: a rank of the default group.

        Raises:
            UsageError: a value cannot be pickled; the other ranks raise MismatchError.
            GroupError: a rank has died. Arrays may be partly written; call `restore` to set the last committed values.
        """
        mine, is_source = self._trees(), get_rank() == whole("src", src)
        skeleton, arrays = without_arrays(mine) if is_source else (None, [])
        box = [skeleton]
        broadcast_object_list(box, src)
        if not is_source:
            mine, arrays = with_buffers(box[0], mine)
        if arrays:
            broadcast(arrays, src)
        if not is_source:
            self._put(mine)
        self._keep()

    def at_commit(self, call: Callable[[], None] | None) -> None:
        """Set the function that is called at the end of each commit; None: no function."""
        self._at_commit = call

    def _keep(self) -> None:
        """Keep a copy of all current values. After an exception, the whole new copy is kept, or the whole old one."""
        kept, write = copied(self._trees(), self._kept)
        try:
            self._kept = kept
            write()
        except BaseException:
            self._kept = kept
            write()
            raise

    def _trees(self) -> dict[str, Tree]:
        values = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return {name: value.state_dict() if _loads(value) else value for name, value in values.items()}

    def _put(self, trees: dict[str, Tree]) -> None:
        for name in self._trees().keys() - trees.keys():
            delattr(self, name)
        for name, tree in trees.items():
            value: Any = vars(self).get(name)
            if _loads(value):
                value.load_state_dict(tree)
            else:
                setattr(self, name, tree)


def _loads(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
