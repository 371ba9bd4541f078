"""What the layout files claim of classes, held against the classes themselves."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from zoo import ZOO, build, save

from gqaconvert.attention.recognise import recognise
from gqaconvert.attention.specs import (
    certified_types,
    layout_for,
    layout_specs,
    refusal,
    rope_pairing,
)
from gqaconvert.checkpoint.index import read_index
from gqaconvert.kv_cache.model_config import read_config

NOT_ROTATE_HALF = {
    "gpt_oss": ("torch.chunk(x, 2, dim=-1)", "halves"),
    "llama4_text": ("view_as_complex", "adjacent"),
}
"""Classes that turn dimensions otherwise: a piece of their source that says which, and which."""
WITHOUT_ROPE = {"gpt_bigcode", "zamba"}


def modeling(model_type: str):
    module = CONFIG_MAPPING[model_type].__module__.replace("configuration_", "modeling_")
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:  # an alias of another class
        names = {"sarvam_moe": "Glm4MoeForCausalLM"}
        name = names.get(model_type, "LlamaForCausalLM")
        return importlib.import_module(getattr(transformers, name).__module__)


@pytest.mark.parametrize("model_type", sorted(certified_types() - WITHOUT_ROPE))
def test_rope_pairs_the_dimensions_that_the_class_turns_together(model_type):
    module = modeling(model_type)
    if model_type in NOT_ROTATE_HALF:
        code, pairing = NOT_ROTATE_HALF[model_type]
        assert code in inspect.getsource(module)
    else:
        partners = module.rotate_half(torch.arange(8.0)).abs().int().tolist()
        pairing = {(4, 5, 6, 7, 0, 1, 2, 3): "halves", (1, 0, 3, 2, 5, 4, 7, 6): "adjacent"}[
            tuple(partners)
        ]
    assert rope_pairing(model_type) == pairing


@pytest.mark.parametrize("model_type", sorted(WITHOUT_ROPE))
def test_classes_without_rope_rotate_nothing(model_type):
    assert not hasattr(modeling(model_type), "rotate_half")


@pytest.mark.parametrize("name", ZOO)
def test_kind_of_key_norm_is_the_same_with_one_head(name, tmp_path):
    """With one KV head the shape of a gain tells nothing; only the list of classes does."""
    kinds = {}
    for kv in ZOO[name].legal:
        folder = save(build(name, num_kv_heads=kv), tmp_path / str(kv))
        attention = recognise(read_index(folder).tensors, read_config(folder))
        assert attention.num_kv_heads == kv
        assert attention.poolable() == tuple(n for n in ZOO[name].legal if n < kv)
        kinds[kv] = {block.key_norm for block in attention.blocks}
    assert len({frozenset(kind) for kind in kinds.values()}) == 1, kinds


def test_no_class_is_listed_twice_or_both_listed_and_refused():
    listed = [name for spec in layout_specs() for name in spec.model_types]
    assert len(listed) == len(set(listed))
    assert not [name for name in listed if refusal(name)]
    assert all(name in CONFIG_MAPPING for name in listed)


def test_full_width_norms_are_certified_classes():
    assert set(layout_for("olmo2").full_width_key_norm) <= certified_types()
