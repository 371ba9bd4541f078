"""Computes the bytes of changed tensors, block by block, so that memory holds one group of heads.

The streamed conversion, the one in memory and the verification all call `changed_blocks`: there is
one arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from gqaconvert.attention.layouts import Role, block_rows
from gqaconvert.checkpoint.reader import NUMPY_TYPES, Array
from gqaconvert.errors import CheckpointError
from gqaconvert.surgery.methods import METHODS, GroupContext
from gqaconvert.surgery.plan import ConversionPlan, PlannedTensor

ReadRows = Callable[[int, int, int], Array]
"""(number of the source tensor, first row, one past the last row) → rows in their stored type."""

WIDE_TYPES: dict[str, type[np.floating]] = {
    "BF16": np.float32,
    "F16": np.float32,
    "F32": np.float64,
    # 64 bits of mantissa where the platform has them; equal heads then still average to themselves.
    "F64": np.longdouble,
}
"""Type in which heads are pooled: wide enough that a sum of equal elements is exact."""

_ROLES: dict[Role, str] = {"q": "query", "k": "key", "v": "value"}


def changed_blocks(
    plan: ConversionPlan, tensor: PlannedTensor, read_rows: ReadRows, blocks: range | None = None
) -> Iterator[Array]:
    """Yield the head blocks of a changed tensor in row order, in the output's type.

    Args:
        plan: the conversion.
        tensor: one of its changed tensors.
        read_rows: gives rows of the source tensors.
        blocks: which blocks; all of them by default.

    Raises:
        CheckpointError: K or V holds a value that is not finite.
    """
    change = tensor.heads
    if change is None:
        raise ValueError(f"{tensor.output.name} has no heads that change")
    source = tensor.sources[0]
    target = NUMPY_TYPES[tensor.output.dtype]
    one_block_each = len(tensor.sources) > 1
    rows = (
        source.shape[0]
        if one_block_each
        else block_rows(change.before, source.shape[0], change.num_heads, change.num_kv_heads)
    )
    for number, (head, numbers) in enumerate(change.blocks()):
        if blocks is not None and number not in blocks:
            continue
        if one_block_each:
            heads = [read_rows(n, 0, rows) for n in numbers]
        else:
            heads = [read_rows(0, n * rows, (n + 1) * rows) for n in numbers]
        if head.role == "q":
            yield heads[0].astype(target, copy=False)
            continue
        if len(heads) == 1:
            yield _finite(heads[0].astype(target, copy=False), tensor, head.number, head.role)
            continue
        context = GroupContext(
            tensor=tensor.output.name,
            group=head.number,
            role="key_norm" if change.role == "key_norm" else _ROLES[head.role],
            seed=plan.options.seed,
            initializer_range=plan.initializer_range,
        )
        wide = [h.astype(WIDE_TYPES[source.dtype]) for h in heads]
        pooled = METHODS[plan.options.averaging](wide, context).astype(target)
        yield _finite(pooled, tensor, head.number, head.role)


def _finite(block: Array, tensor: PlannedTensor, number: int, role: Role) -> Array:
    # Adding up is several times faster than asking each element, and is finite only if every
    # element is.
    with np.errstate(over="ignore", invalid="ignore"):
        suspicious = not np.isfinite(block.astype(np.float32, copy=False).sum(dtype=np.float64))
    if suspicious and not np.isfinite(block.astype(np.float64)).all():
        raise CheckpointError(
            f"{_ROLES[role]} head {number} holds values that are not finite",
            at=f"{tensor.sources[0].file} tensor {tensor.sources[0].name!r}",
            remedy="repair or fetch the checkpoint again; pooling would spread them",
        )
    return block
