"""The table of the kinds of collective operations, from which all other lists of kinds in the package are made.

A kind's *form* determines which arrays its Operation (operation.py) has:

    form              outputs                       inputs
    WORD              -                             -      no operation, only a call word (signature.py)
    NO_ARRAY          -                             -
    IN_PLACE          the array                     the same array
    ONE_TO_ONE        the result                    the array, which may be the output
    BLOCKS_TO_ONE     the result                    a block for each rank
    ONE_TO_BLOCKS     a block for each rank         the array
    BLOCKS_TO_BLOCKS  a block for each rank         a block for each rank
    LIST_IN_PLACE     the arrays                    the same arrays
    LIST_TO_BLOCKS    for each array, a block for   the arrays
                      each rank: that of array k
                      and rank r is outputs[k * size + r]

In a gather or scatter only the root has the blocks; in a reduce only the root has the result. In a broadcast every rank
has the array. Ranks must agree in kind and dtype, in the reduction if the kind reduces, and in the root if it has one.
If the kind is not uneven, every rank must contribute the same number of bytes.

The position of a kind in the table is its number in call words and failpoints, so the order must not change.
*Compositions* are kinds that are carried out by calls of another kind. They are at the end of the table and have no
number, since ranks compare the calls that carry them out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

(
    WORD,
    NO_ARRAY,
    IN_PLACE,
    ONE_TO_ONE,
    BLOCKS_TO_ONE,
    ONE_TO_BLOCKS,
    BLOCKS_TO_BLOCKS,
    LIST_IN_PLACE,
    LIST_TO_BLOCKS,
) = range(9)


class Kind(NamedTuple):
    """The properties of one kind of operations.

    Attributes:
        form: which arrays an operation has.
        root: the public function's name for the root, "src" or "dst"; "" for a kind without a root.
        reduces: whether the kind takes a ReduceOp.
        uneven: whether ranks may differ in the bytes that they contribute.
        made_of: for a composition, the kind that carries it out if the backend does not have it natively; else "".
    """

    form: int
    root: str = ""
    reduces: bool = False
    uneven: bool = False
    made_of: str = ""

    @property
    def is_in_place(self) -> bool:
        """Whether the outputs are the inputs."""
        return self.form in (IN_PLACE, LIST_IN_PLACE)

    @property
    def takes_blocks(self) -> bool:
        """Whether the outputs are blocks, one for each rank."""
        return self.form in (ONE_TO_BLOCKS, BLOCKS_TO_BLOCKS)

    @property
    def gives_blocks(self) -> bool:
        """Whether the inputs are blocks, one for each rank."""
        return self.form in (BLOCKS_TO_ONE, BLOCKS_TO_BLOCKS)

    @property
    def has_blocks(self) -> bool:
        """Whether there are blocks, one for each rank, on either side."""
        return self.takes_blocks or self.gives_blocks

    @property
    def is_by_pair(self) -> bool:
        """Whether only the sender and the receiver know how many bytes move between them."""
        return self.form == BLOCKS_TO_BLOCKS or (self.has_blocks and self.root != "")


KINDS = {
    "none": Kind(WORD),
    "all_reduce": Kind(IN_PLACE, reduces=True),
    "reduce": Kind(ONE_TO_ONE, root="dst", reduces=True),
    "scan": Kind(ONE_TO_ONE, reduces=True),
    "exscan": Kind(ONE_TO_ONE, reduces=True),
    "reduce_scatter": Kind(BLOCKS_TO_ONE, reduces=True),
    "broadcast": Kind(IN_PLACE, root="src"),
    "all_gather": Kind(ONE_TO_BLOCKS, uneven=True),
    "gather": Kind(ONE_TO_BLOCKS, root="dst", uneven=True),
    "scatter": Kind(BLOCKS_TO_ONE, root="src", uneven=True),
    "all_to_all": Kind(BLOCKS_TO_BLOCKS, uneven=True),
    "barrier": Kind(NO_ARRAY),
    "message": Kind(WORD),
    "symmetric.empty": Kind(WORD),
    "symmetric:all_reduce": Kind(WORD),
    "refused": Kind(NO_ARRAY),
    "monitored_barrier": Kind(NO_ARRAY),
    "all_reduce_coalesced": Kind(LIST_IN_PLACE, reduces=True, made_of="all_reduce"),
    "all_gather_coalesced": Kind(LIST_TO_BLOCKS, uneven=True, made_of="all_gather"),
}

OPERATIONS = [name for name, kind in KINDS.items() if not kind.made_of]
"""The kinds that have a number; a kind's number is its index here."""

NATIVE = frozenset(name for name, kind in KINDS.items() if kind.form != WORD and not kind.made_of)
"""The kinds that every backend carries out natively."""

WITH_ARRAYS = frozenset(name for name, kind in KINDS.items() if kind.form not in (WORD, NO_ARRAY))
"""The kinds that move data, including compositions."""

METHODS = {
    method: name
    for name, kind in KINDS.items()
    if kind.form != WORD and name != "refused"  # users cannot call "refused"
    for method in ((name, f"{name}_single") if kind.has_blocks else (name,))
}
"""The kind of each ProcessGroup method for a collective. A method `..._single` takes all blocks as one array."""


def call(group: Any, method: str, out: Any, given: Any, root: Any, op: Any) -> Any:
    """Call one of a group's METHODS, with only those arguments that its kind takes.

    Args:
        out: the output, or the list of output blocks; for a kind without blocks, the array.
        given: the input, or the list of input blocks; ignored for a kind without blocks.
    """
    kind = KINDS[METHODS[method]]
    arrays = (out, given) if kind.has_blocks else () if kind.form == NO_ARRAY else (out,)
    if kind.form == ONE_TO_BLOCKS and kind.root:
        arrays = given, out  # with a root, the array that every rank has comes first
    return getattr(group.fast, method)(
        *arrays, *((root,) if kind.root else ()), *((op,) if kind.reduces else ())
    )
