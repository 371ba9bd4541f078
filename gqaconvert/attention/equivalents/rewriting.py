"""Rewrites the tensors of a checkpoint under the names of another class, on headers alone.

A mapping takes every tensor of the source by name and says what becomes of it; what nobody took
is refused, so that no weight is lost in silence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gqaconvert.checkpoint.tensors import CheckpointIndex, Derived, StoredTensor
from gqaconvert.errors import CheckpointError, UnsupportedModelError
from gqaconvert.kv_cache.model_config import ModelConfig, parse_config
from gqaconvert.units import ELEMENT_TYPES

Compute = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True)
class Equivalent:
    """A checkpoint read as another class.

    Attributes:
        config: config of the other class, with as many KV heads as query heads.
        index: its tensors.
        name: the other class, such as "PhiForCausalLM".
        notices: where the two still differ: what rounding costs, what callers must pass.
    """

    config: ModelConfig
    index: CheckpointIndex
    name: str
    notices: tuple[str, ...] = ()


class Rewriting:
    """One rewriting under way.

    Args:
        config: the source's config.
        index: its headers.
        prefix: what its class puts before the names of its body; files of the bare body lack it,
            or a part of it.
        ignored: names, without prefix, that the source's own class ignores, such as stored masks.
    """

    def __init__(
        self, config: ModelConfig, index: CheckpointIndex, *, prefix: str, ignored: str
    ) -> None:
        self._config, self._index = config, index
        self._rank = {name: rank for rank, name in enumerate(index.tensors)}
        self._names = {_without(prefix, name): name for name in index.tensors}
        self._ignored = re.compile(ignored)
        self._taken: set[str] = set()
        self._written: list[tuple[int, StoredTensor, Derived | None]] = []

    def has(self, name: str) -> bool:
        """Whether the source holds a tensor."""
        return name in self._names

    @property
    def rounds(self) -> bool:
        """Whether tensors taken so far are stored in 16 bits, so that computing rounds."""
        taken = (self._index.tensors[name] for name in self._taken)
        return any(ELEMENT_TYPES[tensor.dtype].size_bytes == 2 for tensor in taken)

    def take(self, name: str, shape: tuple[int, ...] | None = None) -> StoredTensor:
        """Return a tensor of the source, which thereby counts as used.

        Raises:
            CheckpointError: there is none, or it has another shape than its config says.
            UnsupportedModelError: its elements are packed or quantised.
        """
        if name not in self._names:
            raise CheckpointError(
                f"tensor {name!r} of this {self._config.model_type} checkpoint is missing",
                at=self._config.at,
                remedy="fetch the checkpoint again",
            )
        tensor = self._index.tensors[self._names[name]]
        if not ELEMENT_TYPES[tensor.dtype].is_weight:
            raise UnsupportedModelError(
                f"element type {tensor.dtype} cannot be rewritten",
                at=tensor.name,
                remedy="convert the unquantised checkpoint, then quantise the result",
            )
        if shape is not None and tensor.shape != shape:
            raise CheckpointError(
                f"shape is {list(tensor.shape)}, by the config it is {list(shape)}",
                at=f"{tensor.file} tensor {tensor.name!r}",
                remedy="restore the original config.json",
            )
        self._taken.add(tensor.name)
        return tensor

    def rename(self, name: str, new: str) -> None:
        """Let a tensor only change its name: its bytes move as they are."""
        tensor = self.take(name)
        self._write(tensor, replace(tensor, name=new), None)

    def rename_module(self, name: str, new: str) -> None:
        """Let the weight and the bias of a module only change their names."""
        self.rename(f"{name}.weight", f"{new}.weight")
        self.rename(f"{name}.bias", f"{new}.bias")

    def rename_rows(self, name: str, new: str, begin: int) -> None:
        """Keep the rows of a matrix from `begin` on."""
        tensor = self.take(name)
        rows, width = tensor.shape
        if tensor.strides is not None:
            self.derive(new, (tensor,), lambda found: found[0][begin:], (rows - begin, width))
            return
        skipped = begin * width * ELEMENT_TYPES[tensor.dtype].size_bytes
        kept = replace(tensor, name=new, shape=(rows - begin, width), begin=tensor.begin + skipped)
        self._write(tensor, kept, None)

    def derive(
        self, new: str, inputs: Sequence[StoredTensor], compute: Compute, shape: tuple[int, ...]
    ) -> None:
        """Compute a tensor, of the first input's type, from tensors that were taken."""
        first = inputs[0]
        tensor = StoredTensor(new, first.dtype, shape, first.file, 0, 0)
        self._write(first, tensor, Derived(tuple(inputs), compute))

    def constant(self, new: str, value: float, shape: tuple[int, ...], beside: str) -> None:
        """Write a tensor of one value, in type and file like a tensor of the source."""
        like = self.take(beside)
        tensor = StoredTensor(new, like.dtype, shape, like.file, 0, 0)
        self._write(like, tensor, Derived((), lambda _: np.full(shape, value, np.float32)))

    def rename_head(self, names: tuple[str, ...], new: str, embeddings: str) -> str:
        """Rename the output embeddings if they are stored; return which source tensor holds them.

        Args:
            names: names that the source's class reads them from.
            new: their name in the other class.
            embeddings: the source's input embeddings, to which they may be tied.

        Raises:
            UnsupportedModelError: they are neither stored nor tied.
        """
        for name in names:
            if self.has(name):
                self.rename(name, new)
                return name
        if not self._config.tie_word_embeddings:
            raise UnsupportedModelError(
                "the checkpoint holds the body of a model without its language-model head",
                at=self._config.at,
                remedy="the checkpoint of a causal language model",
            )
        return embeddings

    def finish(
        self, raw: Mapping[str, Any], name: str, notices: tuple[str, ...] = ()
    ) -> Equivalent:
        """Return the checkpoint as the other class.

        Args:
            raw: content of its config.json.
            name: the class.
            notices: what the reader should know.

        Raises:
            UnsupportedModelError: the source holds a tensor that nobody took.
        """
        for short, full in self._names.items():
            if full not in self._taken and not self._ignored.fullmatch(short):
                raise UnsupportedModelError(
                    f"{name}, into which {self._config.model_type} is rewritten, has no place for"
                    " this tensor",
                    at=f"{self._index.tensors[full].file} tensor {full!r}",
                )
        # In the order of the source's bytes, so that neighbours are still copied in one go.
        ordered = sorted(self._written, key=lambda entry: entry[0])
        index = replace(
            self._index,
            tensors={tensor.name: tensor for _, tensor, _ in ordered},
            derived={tensor.name: derived for _, tensor, derived in ordered if derived},
        )
        return Equivalent(parse_config(raw, self._config.at), index, name, notices)

    def _write(self, origin: StoredTensor, tensor: StoredTensor, derived: Derived | None) -> None:
        self._written.append((self._rank[origin.name], tensor, derived))


def _without(prefix: str, name: str) -> str:
    """Drop the prefix, or those of its first parts that a file of the bare body lacks."""
    parts = prefix.split(".")
    for first in range(len(parts)):
        rest = ".".join(parts[first:]) + "."
        if name.startswith(rest):
            return name.removeprefix(rest)
    return name
