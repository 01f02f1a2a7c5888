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
from .copies import Path, Tree, copied, replaced, with_buffers, without_arrays


class State:
    """Values that survive the death of ranks. They are attributes, which may be added and set at any time.

    A value has one of these kinds, or is a dict, list or tuple of such values:
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
        self._loaders: dict[Path, Any] = {}  # the objects that had a `state_dict` at the last commit
        self._keep()

    def __getattr__(self, name: str) -> Any:  # lets type checkers accept any attribute
        raise AttributeError(f"the state has no {name!r}; it has {', '.join(self._values())}")

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
        current, _ = _with_state_dicts(self._values(), only=self._loaders)
        trees, write = copied(self._kept, current)
        write()
        self._put(trees, self._loaders)

    def sync(self, src: int = 0) -> None:
        """Set the values of all ranks to those of rank `src`, and commit them; collective. Arrays are set in place.

        Args:
            src: a rank of the default group.

        Raises:
            UsageError: a value cannot be pickled; the other ranks raise MismatchError. Or rank `src` has an object with
                `load_state_dict`, and this rank has none of that name.
            GroupError: a rank has died. Arrays may be partly written; call `restore` to set the last committed values.
        """
        is_source = get_rank() == whole("src", src)
        mine, loaders = _with_state_dicts(self._values())
        skeleton, arrays = without_arrays(mine) if is_source else (None, [])
        box = [(skeleton, list(loaders))]
        broadcast_object_list(box, src)
        skeleton, paths = box[0]
        write = None
        if not is_source:
            mine, arrays, write = with_buffers(skeleton, mine)
        if arrays:
            broadcast(arrays, src)
        if write is not None:
            write()
            if missing := [path for path in paths if path not in loaders]:
                name = ".".join(map(str, missing[0]))
                raise UsageError(
                    f"the state's {name} is an object with load_state_dict on rank {src}, and not here; make this "
                    "object on all ranks before the state is copied, which `run` does first"
                )
            self._put(mine, {path: loaders[path] for path in paths})
        self._keep()

    def at_commit(self, call: Callable[[], None] | None) -> None:
        """Set the function that is called at the end of each commit; None: no function."""
        self._at_commit = call

    def _keep(self) -> None:
        """Keep a copy of all current values. After an exception, the whole new copy is kept, or the whole old one."""
        values, loaders = _with_state_dicts(self._values())
        kept, write = copied(values, self._kept)
        try:
            self._kept, self._loaders = kept, loaders
            write()
        except BaseException:
            self._kept, self._loaders = kept, loaders
            write()
            raise

    def _values(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def _put(self, trees: dict[str, Tree], loaders: dict[Path, Any]) -> None:
        """Set all values; the objects in `loaders` load what is at their paths."""

        def loaded(path: Path, tree: Tree) -> Any:
            if path not in loaders:
                return tree
            loaders[path].load_state_dict(tree)
            return loaders[path]

        for name in self._values().keys() - trees.keys():
            delattr(self, name)
        vars(self).update(replaced(trees, loaded))


def _with_state_dicts(
    values: dict[str, Any], only: dict[Path, Any] | None = None
) -> tuple[dict[str, Tree], dict[Path, Any]]:
    """Return the values with the `state_dict` in place of each object that has one, and these objects by their paths.

    If `only` is given, an object that is not at the same path of it stays in its place.
    """
    found, state_dicts = dict[Path, Any](), dict[int, Any]()

    def state_dict(path: Path, x: Any) -> Any:
        if not hasattr(x, "state_dict") or not hasattr(x, "load_state_dict") or isinstance(x, type):
            return x
        if not callable(x.load_state_dict):
            return x  # for example a dict whose attributes are its keys, and None for others
        if only is not None and only.get(path) is not x:
            return x
        found[path] = x
        if id(x) not in state_dicts:  # else its arrays would be copied and sent twice
            state_dicts[id(x)] = x.state_dict()
        return state_dicts[id(x)]

    return replaced(values, state_dict), found
