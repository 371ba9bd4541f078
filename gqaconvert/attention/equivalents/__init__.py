"""Stock classes that compute what another does, for classes that cannot hold fewer KV heads.

A mapping reads a checkpoint as one of the other class: tensors that only change their name stay
byte ranges on disk, the others are `Derived`. What is recognised, planned and pooled after that
is the other class. One module a source family.
"""

from __future__ import annotations

from collections.abc import Callable

from gqaconvert.attention.equivalents.gpt2 import read_gpt2
from gqaconvert.attention.equivalents.gpt_neox import read_gpt_neox
from gqaconvert.attention.equivalents.gptj import read_codegen, read_gptj
from gqaconvert.attention.equivalents.opt import read_opt
from gqaconvert.attention.equivalents.rewriting import Equivalent
from gqaconvert.checkpoint.tensors import CheckpointIndex
from gqaconvert.errors import UnsupportedModelError
from gqaconvert.kv_cache.model_config import ModelConfig

__all__ = ["MAPPINGS", "Equivalent", "Mapping", "find_equivalent"]

Mapping = Callable[[ModelConfig, CheckpointIndex], Equivalent]

MAPPINGS: dict[str, Mapping] = {
    "codegen": read_codegen,
    "gpt2": read_gpt2,
    "gpt_neox": read_gpt_neox,
    "gptj": read_gptj,
    "opt": read_opt,
}
"""model_type → mapping."""


def find_equivalent(config: ModelConfig, index: CheckpointIndex) -> Equivalent | None:
    """Return the checkpoint as its equivalent class, None where its own is converted or refused.

    Raises:
        UnsupportedModelError: this checkpoint uses an option that its equivalent class lacks.
        CheckpointError: tensors and config contradict each other.
    """
    mapping = MAPPINGS.get(config.model_type)
    if mapping is None:
        return None
    if config.quantization:
        raise UnsupportedModelError(
            f"weights are quantised ({config.quantization}); packed heads cannot be pooled",
            at=config.at,
            remedy="convert the unquantised checkpoint, then quantise the result",
        )
    return mapping(config, index)
