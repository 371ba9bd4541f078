"""From names, shapes and config to attention, or to the exact reason why not."""

from __future__ import annotations

import json

import numpy as np
import pytest
from checkpoints import NUMPY, llama_config, llama_tensors, write_safetensors

import gqaconvert
from gqaconvert.attention.recognise import recognise
from gqaconvert.checkpoint.index import read_index
from gqaconvert.checkpoint.tensors import StoredTensor
from gqaconvert.errors import CheckpointError, GqaconvertError, UnsupportedModelError
from gqaconvert.kv_cache.model_config import parse_config, read_config

PREFIX = "model.layers.1.self_attn"


@pytest.fixture
def checkpoint(tmp_path):
    """Writes a Llama with changes to its tensors and config, and recognises it."""

    def write(tensors=None, *, drop=(), add=None, config=None, prefix="", **shape):
        arrays = llama_tensors(**shape) if tensors is None else tensors
        arrays = {prefix + k: v for k, v in arrays.items() if k not in drop} | (add or {})
        write_safetensors(tmp_path / "model.safetensors", arrays)
        written = llama_config(**shape) | (config or {})
        written = {key: value for key, value in written.items() if value != "absent"}
        (tmp_path / "config.json").write_text(json.dumps(written))
        return recognise(read_index(tmp_path).tensors, read_config(tmp_path))

    return write


def retyped(tensors, name, dtype):
    """Tensors of an index of which one has another element type."""
    index = {
        key: StoredTensor(key, "BF16", value.shape, "model.safetensors", 0, 0)
        for key, value in tensors.items()
    }
    old = index[name]
    index[name] = StoredTensor(name, dtype, old.shape, old.file, 0, 0)
    return index


def random(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(NUMPY["BF16"])


class TestUnderstood:
    @pytest.mark.parametrize(("kv_heads", "kind"), [(4, "MHA"), (2, "GQA"), (1, "MQA")])
    def test_counts_come_from_shapes(self, checkpoint, kv_heads, kind):
        attention = checkpoint(kv_heads=kv_heads, bias=True, layers=3)
        assert (attention.num_heads, attention.num_kv_heads, attention.kind) == (4, kv_heads, kind)
        assert [block.layer for block in attention.blocks] == [0, 1, 2]
        first = attention.blocks[0]
        assert (first.head_dim, first.v_head_dim, first.biases) == (8, 8, "qkvo")
        assert [tensor.name.split("self_attn.")[1] for tensor in first.head_tensors] == [
            "k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias"
        ]  # fmt: skip

    def test_legal_counts_divide(self, checkpoint):
        attention = checkpoint(heads=12, kv_heads=12, head_dim=4)
        assert attention.poolable() == (6, 4, 3, 2, 1)
        assert not any(attention.is_poolable(n) for n in (-1, 0, 5, 7, 12, 13, 24))

    def test_repeated_counts_divide_the_query_heads_too(self, checkpoint):
        attention = checkpoint(heads=12, kv_heads=2, head_dim=4)
        assert [n for n in range(30) if attention.is_expandable(n)] == [4, 6, 12]

    def test_without_a_count_in_the_config_the_class_means_all_heads(self, checkpoint):
        assert checkpoint(config={"num_key_value_heads": "absent"}).num_kv_heads == 4

    def test_names_without_the_prefix_of_a_causal_model(self, checkpoint, tmp_path):
        tensors = {k.removeprefix("model."): v for k, v in llama_tensors().items()}
        assert checkpoint(tensors).blocks[1].module == "layers.1.self_attn"

    def test_unknown_class_with_ordinary_names_and_key(self, checkpoint):
        attention = checkpoint(config={"model_type": "grandiose"})
        assert (attention.num_kv_heads, attention.certified) == (4, False)
        assert checkpoint().certified

    def test_draft_layers_are_pooled_with_the_others(self, checkpoint):
        extra = {
            name.replace("model.layers.1", "mtp.layers.0"): array
            for name, array in llama_tensors(seed=1).items()
            if name.startswith("model.layers.1")
        }
        assert [b.module for b in checkpoint(add=extra).blocks][-1] == "mtp.layers.0.self_attn"
        numbered = {name.replace("mtp.layers.0", "model.layers.2"): a for name, a in extra.items()}
        assert [b.layer for b in checkpoint(add=numbered).blocks] == [0, 1, 2]

    def test_draft_layers_are_pooled_where_the_layer_of_that_number_has_no_keys(self, checkpoint):
        extra = {
            name.replace("model.layers.0", "mtp.layers.0"): array
            for name, array in llama_tensors().items()
            if name.startswith("model.layers.0")
        }
        hybrid = {
            "model_type": "qwen3_next",
            "head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
        }
        gone = [name for name in llama_tensors() if name.startswith("model.layers.0.self_attn")]
        attention = checkpoint(drop=gone, add=extra, config=hybrid)
        assert [b.module for b in attention.blocks] == [PREFIX, "mtp.layers.0.self_attn"]

    @pytest.mark.parametrize("tower", ["vision_tower", "visual", "audio_tower", "vision_model"])
    def test_towers_are_no_part_of_the_language_model(self, checkpoint, tower):
        extra = {
            f"{tower}.encoder.layers.0.self_attn.{p}_proj.weight": random(48, 48) for p in "qkvo"
        }
        attention = checkpoint(add=extra)
        assert [block.module for block in attention.blocks] == [
            "model.layers.0.self_attn", "model.layers.1.self_attn"
        ]  # fmt: skip

    def test_indexers_are_left_alone(self, checkpoint):
        extra = {f"{PREFIX}.indexer.{p}_proj.weight": random(8, 32) for p in "qk"}
        assert len(checkpoint(add=extra).blocks) == 2

    def test_gated_queries(self, checkpoint):
        doubled = {
            f"model.layers.{layer}.self_attn.q_proj.weight": random(64, 32) for layer in (0, 1)
        }
        assert checkpoint(add=doubled).num_kv_heads == 4


class TestContradictions:
    @pytest.mark.parametrize("edited", [1, 2])
    def test_a_config_edited_by_hand_names_both_counts(self, checkpoint, edited):
        message = f"config says {edited} KV heads, the tensors hold 4"
        with pytest.raises(CheckpointError, match=message) as caught:
            checkpoint(config={"num_key_value_heads": edited})
        assert "num_key_value_heads" in caught.value.at
        assert "original config.json" in caught.value.remedy

    def test_more_kv_heads_than_the_tensors_hold(self, checkpoint):
        with pytest.raises(CheckpointError, match="config says 4 KV heads, the tensors hold 2"):
            checkpoint(llama_tensors(kv_heads=2))

    @pytest.mark.parametrize("count", [3, 8, 0, -1, "4", 2.0])
    def test_counts_that_cannot_be(self, checkpoint, count):
        with pytest.raises(CheckpointError):
            checkpoint(config={"num_key_value_heads": count})

    @pytest.mark.parametrize(
        ("projection", "rows", "message"),
        [
            ("q", 24, "24 rows are not 4 query heads of 8"),
            ("v", 20, "20 does not divide by 8 dimensions a head"),
            ("k", 30, "30 does not divide by 4 KV heads"),
            ("k", 0, "0 does not divide"),
        ],
    )
    def test_shapes_that_do_not_fit_together(self, checkpoint, projection, rows, message):
        name = f"{PREFIX}.{projection}_proj.weight"
        with pytest.raises(CheckpointError, match=message) as caught:
            checkpoint(add={name: random(rows, 32)})
        assert name.startswith(caught.value.at)

    def test_layers_with_other_counts(self, checkpoint):
        narrow = {f"{PREFIX}.{p}_proj.weight": random(16, 32) for p in "kv"}
        with pytest.raises(UnsupportedModelError, match="layers differ in KV heads: 4 in"):
            checkpoint(add=narrow)

    def test_another_number_of_query_heads(self, checkpoint):
        with pytest.raises(CheckpointError):
            checkpoint(config={"num_attention_heads": 8})

    def test_a_missing_layer(self, checkpoint):
        gone = [name for name in llama_tensors() if name.startswith(PREFIX)]
        with pytest.raises(CheckpointError, match=r"layers \[1\] have no attention tensors"):
            checkpoint(drop=gone)

    @pytest.mark.parametrize(("part", "label"), [("q", "query"), ("o", "output")])
    def test_a_missing_projection(self, checkpoint, part, label):
        with pytest.raises(UnsupportedModelError, match=f"no {label} projection") as caught:
            checkpoint(drop=[f"{PREFIX}.{part}_proj.weight"])
        assert caught.value.at == PREFIX

    @pytest.mark.parametrize("part", "kv")
    def test_a_key_or_value_alone(self, checkpoint, part):
        with pytest.raises(GqaconvertError) as caught:
            checkpoint(drop=[f"{PREFIX}.{part}_proj.weight"])
        assert caught.value.at

    def test_a_projection_that_is_no_matrix(self, checkpoint):
        with pytest.raises(UnsupportedModelError, match="is not a matrix"):
            checkpoint(add={f"{PREFIX}.k_proj.weight": random(4, 8, 32)})

    def test_two_stacks_of_layers(self, checkpoint):
        extra = {
            name.replace("model.layers", "picture_reader.layers"): array
            for name, array in llama_tensors(seed=1).items()
            if "self_attn" in name
        }
        with pytest.raises(UnsupportedModelError, match="two stacks of layers") as caught:
            checkpoint(add=extra)
        assert caught.value.at == "picture_reader.layers.0.self_attn"

    def test_a_key_norm_that_fits_nothing(self, checkpoint):
        with pytest.raises(UnsupportedModelError, match=r"key norm of shape \[9\]"):
            checkpoint(add={f"{PREFIX}.k_norm.weight": random(9)})


class TestRefused:
    @pytest.mark.parametrize("dtype", ["I8", "U8", "I32", "F8_E4M3", "F8_E5M2"])
    @pytest.mark.parametrize("projection", ["k_proj", "v_proj"])
    def test_quantised_elements(self, dtype, projection):
        name = f"{PREFIX}.{projection}.weight"
        tensors = retyped(llama_tensors(), name, dtype)
        with pytest.raises(UnsupportedModelError, match=dtype) as caught:
            recognise(tensors, parse_config(llama_config(), "config.json"))
        assert caught.value.at == name
        assert "unquantised" in caught.value.remedy

    @pytest.mark.parametrize("kind", ["weight_scale", "weight_scale_inv", "qweight", "qzeros"])
    def test_packed_weights(self, checkpoint, kind):
        with pytest.raises(UnsupportedModelError, match="packed or quantised"):
            checkpoint(add={f"{PREFIX}.k_proj.{kind}": random(4, 4)})

    def test_weights_that_are_only_packed(self, checkpoint):
        tensors = {
            name.replace("proj.weight", "proj.qweight"): array
            for name, array in llama_tensors().items()
        }
        with pytest.raises(UnsupportedModelError, match="packed or quantised"):
            checkpoint(tensors)

    def test_a_quantised_mlp_is_not_ours_to_refuse(self):
        tensors = retyped(llama_tensors(), "model.layers.0.mlp.up_proj.weight", "F8_E4M3")
        assert recognise(tensors, parse_config(llama_config(), "config.json")).num_kv_heads == 4

    def test_quantization_config(self, checkpoint):
        with pytest.raises(UnsupportedModelError, match="quantised"):
            checkpoint(config={"quantization_config": {"quant_method": "gptq", "bits": 4}})

    @pytest.mark.parametrize("name", ["k_proj.lora_A.weight", "qkv_proj.weight", "c_attn.weight"])
    def test_unknown_attention_names_in_a_known_class(self, checkpoint, name):
        with pytest.raises(UnsupportedModelError, match="unknown layout") as caught:
            checkpoint(add={f"{PREFIX}.{name}": random(8, 8)})
        assert caught.value.at == f"{PREFIX}.{name}"

    def test_no_known_projection_at_all(self, checkpoint):
        tensors = {
            name.replace("k_proj", "kk").replace("v_proj", "vv"): array
            for name, array in llama_tensors().items()
        }
        with pytest.raises(UnsupportedModelError, match="no attention projections"):
            checkpoint(tensors)

    def test_multi_head_latent_attention(self, checkpoint):
        with pytest.raises(UnsupportedModelError, match="kv_lora_rank=8"):
            checkpoint(
                config={
                    "model_type": "deepseek_v3", "kv_lora_rank": 8, "q_lora_rank": 16,
                    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
                }
            )  # fmt: skip

    def test_encoder_decoder(self, checkpoint):
        with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
            checkpoint(config={"model_type": "grandiose", "is_encoder_decoder": True})

    def test_layers_that_share_keys_and_values(self, checkpoint):
        with pytest.raises(UnsupportedModelError, match="num_kv_shared_layers"):
            checkpoint(config={"model_type": "gemma3n_text", "num_kv_shared_layers": 1})

    @pytest.mark.parametrize("model_type", ["doge", "zaya", "jetmoe", "bloom", "t5"])
    def test_classes_by_name(self, checkpoint, model_type):
        with pytest.raises(UnsupportedModelError, match=f"{model_type} cannot be converted"):
            checkpoint(config={"model_type": model_type})

    def test_a_known_class_without_the_key(self, checkpoint):
        with pytest.raises(UnsupportedModelError, match="accepts the key and ignores it"):
            checkpoint(config={"model_type": "gpt_neox"})

    def test_an_unknown_class_without_the_key(self, checkpoint):
        with pytest.raises(UnsupportedModelError, match=r"config\.json has no key for it"):
            checkpoint(config={"model_type": "grandiose", "num_key_value_heads": "absent"})


def test_an_unknown_class_is_converted_with_a_notice(checkpoint, tmp_path):
    checkpoint(config={"model_type": "grandiose"})
    conversion = gqaconvert.convert(tmp_path, tmp_path.parent / "out-unknown", num_kv_heads=2)
    assert any("not in the test matrix" in notice for notice in conversion.notices)
    assert any("transformers has no class" in notice for notice in conversion.notices)
