"""Models without a number of KV heads become an equal class: same logits, nothing lost.

Heads are made equal within their groups first, so that averaging them is exact and any difference
is a fault.
"""

from __future__ import annotations

import json

import pytest
import torch
import zoo
from checkpoints import read_tensors, write_safetensors
from safetensors.torch import load_file, save_file
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig, AutoTokenizer, GPT2Tokenizer

from gqaconvert.attention.equivalents import MAPPINGS, find_equivalent, gpt_neox, gptj
from gqaconvert.attention.inspection import inspect
from gqaconvert.attention.specs import refusal
from gqaconvert.checkpoint.index import read_index
from gqaconvert.checkpoint.reader import TensorReader
from gqaconvert.errors import (
    CheckpointError,
    GqaconvertError,
    UnsupportedModelError,
    UsageError,
    VerificationError,
)
from gqaconvert.kv_cache.model_config import read_config
from gqaconvert.surgery import verify as level_one
from gqaconvert.surgery.convert import convert
from gqaconvert.surgery.verify_model import verify

BECOMES = {
    "gpt_neox": "PhiForCausalLM",
    "gpt_neox-full_rotary": "PhiForCausalLM",
    "gpt_neox-no_bias": "PhiForCausalLM",
    "gpt_neox-sequential": "NemotronForCausalLM",
    "gptj": "PhiForCausalLM",
    "codegen": "PhiForCausalLM",
    "gpt2": "GPTBigCodeForCausalLM",
    "gpt2-inverse_layer": "GPTBigCodeForCausalLM",
    "opt": "GPTBigCodeForCausalLM",
}
BIGCODE = [name for name, becomes in BECOMES.items() if becomes.startswith("GPTBigCode")]
HEADS = zoo.NUM_HEADS


def tie(model, kv_heads):
    """Make the K and V heads of each group equal to the group's first."""
    first = torch.arange(HEADS) // (HEADS // kv_heads) * (HEADS // kv_heads)
    kind = model.config.model_type
    for name, tensor in model.state_dict().items():
        parts = name.split(".")
        projection, rest = parts[-2], tensor.shape[1:]
        if projection == "query_key_value":
            heads = tensor.view(HEADS, 3, -1, *rest)
            heads[:, 1:] = heads[first, 1:]
        elif projection == "c_attn":
            heads = tensor.view(*tensor.shape[:-1], 3, HEADS, -1)
            heads[..., 1:, :, :] = heads[..., 1:, first, :]
        elif projection == "qkv_proj":  # CodeGen: four shards of [q, v, k], here a head each
            heads = tensor.view(HEADS, 3, -1, *rest)
            heads[:, 1:] = heads[first, 1:]
        elif projection in ("k_proj", "v_proj"):
            heads = tensor.view(HEADS, -1, *rest)
            heads[:] = heads[first]
        else:
            assert "attn" not in projection or kind == "opt", name
    return model


def save_tied(name, folder, kv_heads, **options):
    model = tie(zoo.build(name), kv_heads)
    zoo.save(model, folder, **options)
    return model


def written(folder, out):
    """Write what a checkpoint is read as, without pooling."""
    equivalent = find_equivalent(read_config(folder), read_index(folder))
    out.mkdir()
    with TensorReader(folder, equivalent.index.derived) as reader:
        tensors = {n: reader.read(t) for n, t in equivalent.index.tensors.items()}
    write_safetensors(out / "model.safetensors", tensors)
    (out / "config.json").write_text(json.dumps(equivalent.config.raw))
    return out


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("kv_heads", [2, 1])
@pytest.mark.parametrize("name", BECOMES)
def test_converted_computes_what_the_source_does(name, kv_heads, tmp_path):
    if name in BIGCODE and kv_heads > 1:
        zoo.save(zoo.build(name), tmp_path / "source")
        with pytest.raises(UsageError, match="cannot be pooled into 2") as raised:
            convert(tmp_path / "source", tmp_path / "out", num_kv_heads=kv_heads)
        assert raised.value.remedy == "--kv-heads 1"
        return
    source = save_tied(name, tmp_path / "source", kv_heads, shards=3)
    (tmp_path / "source" / "LICENSE").write_bytes(b"licence\r\n\xff")
    done = convert(tmp_path / "source", tmp_path / "out", num_kv_heads=kv_heads)
    converted = zoo.load_cleanly(tmp_path / "out")
    assert type(converted).__name__ == BECOMES[name] == done.source.becomes
    assert converted.config.num_key_value_heads == kv_heads
    assert zoo.logits(source).std() > 0.3
    assert zoo.logits_close(zoo.logits(source), zoo.logits(converted))
    assert (tmp_path / "out" / "LICENSE").read_bytes() == b"licence\r\n\xff"
    checks = verify(tmp_path / "out", tmp_path / "source", deep=True, forward=True).checks
    assert {"rewritten tensors", "class", "cache shape"} <= {check.name for check in checks}
    manifest = json.loads((tmp_path / "out" / "gqaconvert.json").read_text())
    assert manifest["source"]["read_as"] == BECOMES[name]
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"rewritten as `{BECOMES[name]}`" in card
    assert "byte for byte" not in card


@pytest.mark.parametrize("name", BECOMES)
def test_heads_that_differ_are_kept_apart(name, tmp_path):
    source = zoo.build(name, seed=3)
    zoo.save(source, tmp_path / "source")
    equal = zoo.load_cleanly(written(tmp_path / "source", tmp_path / "out"))
    assert zoo.logits_close(zoo.logits(source, length=40), zoo.logits(equal, length=40))


def test_a_skipped_permutation_shows(tmp_path, monkeypatch):
    monkeypatch.setattr(gptj, "halves_from_pairs", lambda rows, heads, rotary: rows)
    source = save_tied("gptj", tmp_path / "source", 2)
    convert(tmp_path / "source", tmp_path / "out", num_kv_heads=2)
    converted = zoo.load_cleanly(tmp_path / "out")
    assert zoo.largest_difference(zoo.logits(source), zoo.logits(converted)) > 0.05


def test_a_norm_that_is_not_folded_shows(tmp_path, monkeypatch):
    monkeypatch.setattr(gpt_neox, "fold_gain", lambda weight, gain: weight)
    source = save_tied("gpt_neox", tmp_path / "source", 2)
    convert(tmp_path / "source", tmp_path / "out", num_kv_heads=2)
    converted = zoo.load_cleanly(tmp_path / "out")
    assert zoo.largest_difference(zoo.logits(source), zoo.logits(converted)) > 0.05


def test_renamed_tensors_keep_their_bytes(tmp_path):
    zoo.save(zoo.build("gptj"), tmp_path / "source")
    plan = convert(tmp_path / "source", tmp_path / "out", num_kv_heads=2).plan
    actions = {tensor.output.name: tensor.action for tensor in plan.tensors}
    assert actions["model.layers.0.mlp.fc1.weight"] == "copy"
    assert actions["model.layers.0.self_attn.q_proj.weight"] == "derive"
    assert actions["model.layers.0.self_attn.k_proj.weight"] == "pool"
    before, after = read_tensors(tmp_path / "source"), read_tensors(tmp_path / "out")
    old, new = "transformer.h.0.mlp.fc_in.weight", "model.layers.0.mlp.fc1.weight"
    assert before[old].tobytes() == after[new].tobytes()


@pytest.mark.parametrize("name", ["gpt_neox", "gpt_neox-sequential", "gptj"])
def test_tied_embeddings_stay_tied(name, tmp_path):
    model = tie(zoo.build(name, tied=True), 2)
    zoo.save(model, tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "out", num_kv_heads=2)
    converted = zoo.load_cleanly(tmp_path / "out")
    assert "lm_head.weight" not in read_tensors(tmp_path / "out")
    assert zoo.logits_close(zoo.logits(model), zoo.logits(converted))


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
    ],
    ids=["linear", "dynamic", "yarn"],
)
@pytest.mark.parametrize("name", ["gpt_neox", "gpt_neox-sequential"])
def test_old_rope_keys_are_carried(name, scaling, tmp_path):
    zoo.save(zoo.build(name), tmp_path / "source")
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    del config["rope_parameters"]
    config |= {"rotary_pct": 0.5, "rotary_emb_base": 5000, "rope_scaling": scaling}
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    source = zoo.load_cleanly(tmp_path / "source")
    equal = zoo.load_cleanly(written(tmp_path / "source", tmp_path / "out"))
    assert zoo.logits_close(zoo.logits(source, length=60), zoo.logits(equal, length=60))


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "gptj", "opt", "codegen"])
def test_files_of_the_bare_body_and_stored_masks(name, tmp_path):
    """OpenAI's own gpt2 has no prefix, and holds masks that its class ignores."""
    model = tie(zoo.build(name, tied=True), 1)
    zoo.save(model, tmp_path / "source")
    path = tmp_path / "source" / "model.safetensors"
    prefix = {"gpt_neox": "gpt_neox.", "opt": "model."}.get(name, "transformer.")
    tensors = {key.removeprefix(prefix): value for key, value in load_file(path).items()}
    mask = {"gpt_neox": "layers.0.attention.bias", "codegen": "h.0.attn.causal_mask"}
    if name != "opt":
        tensors[mask.get(name, "h.0.attn.bias")] = torch.ones(1, 1, 64, 64, dtype=torch.bool)
    save_file(tensors, path, metadata={"format": "pt"})
    convert(tmp_path / "source", tmp_path / "out", num_kv_heads=1)
    converted = zoo.load_cleanly(tmp_path / "out")
    assert zoo.logits_close(zoo.logits(model), zoo.logits(converted))


@pytest.mark.parametrize("name", ["opt", "gpt2", "gpt_neox"])
def test_torch_files(name, tmp_path):
    model = tie(zoo.build(name), 1)
    zoo.save(model, tmp_path / "source")
    (tmp_path / "source" / "model.safetensors").unlink()
    state = model.state_dict()
    if name == "gpt2":  # stored as another framework left it: bytes not in row order
        key = "transformer.h.0.mlp.c_fc.weight"
        state[key] = state[key].t().contiguous().t()
    torch.save(state, tmp_path / "source" / "pytorch_model.bin")
    convert(tmp_path / "source", tmp_path / "out", num_kv_heads=1)
    converted = zoo.load_cleanly(tmp_path / "out")
    assert zoo.logits_close(zoo.logits(model), zoo.logits(converted))


def test_opt_without_biases_and_gains(tmp_path):
    """Galactica's options; what a file holds beyond them is ignored, as OPT's class does."""
    zoo.save(zoo.build("opt"), tmp_path / "source")
    edit_config(tmp_path / "source", enable_bias=False, layer_norm_elementwise_affine=False)
    config = AutoConfig.from_pretrained(tmp_path / "source")
    source = zoo.transformers.OPTForCausalLM.from_pretrained(tmp_path / "source", config=config)
    equal = zoo.load_cleanly(written(tmp_path / "source", tmp_path / "out"))
    assert zoo.logits_close(zoo.logits(source.eval()), zoo.logits(equal))


def test_opt_padded_on_the_left(tmp_path):
    source = save_tied("opt", tmp_path / "source", 1)
    done = convert(tmp_path / "source", tmp_path / "out", num_kv_heads=1)
    assert any("position_ids" in notice for notice in done.notices)
    converted = zoo.load_cleanly(tmp_path / "out")
    ids = torch.tensor([[0, 0, 0, 8, 9, 10], [11, 12, 13, 14, 15, 16]])
    mask = (ids != 0).long()
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    texts = [m.generate(ids, attention_mask=mask, **settings) for m in (source, converted)]
    assert torch.equal(*texts)
    assert len(set(texts[0][:, 6:].flatten().tolist())) > 1


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("gpt2", "add_cross_attention", True),
        ("opt", "do_layer_norm_before", False),
        ("opt", "_remove_final_layer_norm", True),
        ("opt", "word_embed_proj_dim", 16),
        ("gpt_neox", "is_decoder", True),
        ("gpt_neox-sequential", "rope_scaling", {"rope_type": "longrope"}),
        ("gptj", "rotary_dim", None),
        ("gptj", "quantization_config", {"quant_method": "gptq"}),
    ],
)
def test_options_without_an_equal_are_refused(name, option, value, tmp_path):
    zoo.save(zoo.build(name), tmp_path / "source")
    edit_config(tmp_path / "source", **{option: value})
    with pytest.raises(UnsupportedModelError) as raised:
        convert(tmp_path / "source", tmp_path / "out", num_kv_heads=1)
    assert option in str(raised.value) or "gptq" in str(raised.value)
    assert not (tmp_path / "out").exists()
    assert not inspect(tmp_path / "source").convertible


@pytest.mark.parametrize("name", ["opt-post_ln", "opt-projected", "persimmon", "gpt_neo", "bloom"])
def test_models_without_an_equal_are_refused(name, tmp_path):
    zoo.save(zoo.build(name), tmp_path / "source")
    with pytest.raises(UnsupportedModelError):
        convert(tmp_path / "source", tmp_path / "out", num_kv_heads=1)


def test_a_tensor_without_a_place_is_refused(tmp_path):
    zoo.save(zoo.build("gptj"), tmp_path / "source")
    path = tmp_path / "source" / "model.safetensors"
    save_file(load_file(path) | {"score.weight": torch.zeros(2, 64)}, path)
    with pytest.raises(UnsupportedModelError, match="no place") as raised:
        convert(tmp_path / "source", tmp_path / "out", num_kv_heads=1)
    assert "score.weight" in raised.value.at


def test_a_missing_tensor_is_an_error(tmp_path):
    zoo.save(zoo.build("gpt_neox"), tmp_path / "source")
    path = tmp_path / "source" / "model.safetensors"
    tensors = load_file(path)
    del tensors["gpt_neox.layers.1.input_layernorm.bias"]
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"layers\.1\.input_layernorm\.bias"):
        convert(tmp_path / "source", tmp_path / "out", num_kv_heads=1)


def test_a_body_without_a_head_is_refused(tmp_path):
    model = zoo.build("gpt_neox")
    zoo.save(model, tmp_path / "source")
    save_file(model.gpt_neox.state_dict(), tmp_path / "source" / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match="without its language-model head"):
        convert(tmp_path / "source", tmp_path / "out", num_kv_heads=1)


def test_a_gain_too_large_for_float16_is_refused(tmp_path):
    model = zoo.build("gpt_neox")
    with torch.no_grad():
        model.gpt_neox.layers[0].input_layernorm.weight.fill_(60000.0)
        model.gpt_neox.layers[0].attention.query_key_value.weight[0] = 2.0
    zoo.save(model, tmp_path / "source", dtype=torch.float16)
    with pytest.raises(GqaconvertError, match="too large for float16"):
        convert(tmp_path / "source", tmp_path / "out", num_kv_heads=1)


@pytest.mark.parametrize("name", BECOMES)
def test_inspect_says_what_it_becomes(name, tmp_path):
    zoo.save(zoo.build(name), tmp_path / "source")
    found = inspect(tmp_path / "source")
    assert found.convertible
    assert found.becomes == BECOMES[name]
    assert found.legal_kv_heads == ((1,) if name in BIGCODE else (2, 1))
    assert found.model_type == zoo.MHA_ONLY[name].type


def test_a_changed_rewritten_tensor_is_found(tmp_path, monkeypatch):
    zoo.save(zoo.build("gpt_neox"), tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "out", num_kv_heads=1)
    [tensor] = [
        t for n, t in read_index(tmp_path / "out").tensors.items() if n.endswith("0.mlp.fc1.weight")
    ]
    with (tmp_path / "out" / "model.safetensors").open("r+b") as stream:
        stream.seek((tensor.begin + tensor.end) // 2)
        stream.write(b"\x55")
    with pytest.raises(VerificationError, match="rewriting"):
        verify(tmp_path / "out", tmp_path / "source")
    # Of large tensors only some are recomputed, unless all are asked for.
    monkeypatch.setattr(level_one, "_SMALL_BYTES", 0)
    monkeypatch.setattr(level_one, "_LARGE_RECOMPUTED", 0)
    verify(tmp_path / "out", tmp_path / "source")
    with pytest.raises(VerificationError, match="rewriting"):
        verify(tmp_path / "out", tmp_path / "source", deep=True)


@pytest.mark.parametrize(
    ("name", "dtype", "most"),
    [
        ("gpt_neox", torch.bfloat16, 5e-3),
        ("gpt_neox", torch.float16, 6e-4),
        ("gpt_neox-sequential", torch.bfloat16, 2e-3),
        ("gptj", torch.bfloat16, 1e-6),
        ("gpt2", torch.float16, 1e-6),
        ("opt", torch.bfloat16, 1e-6),
    ],
)
def test_what_16_bits_cost(name, dtype, most, tmp_path):
    """Both computed in float32: what is left is the rounding of the rewritten weights."""
    zoo.save(zoo.build(name), tmp_path / "source", dtype=dtype)
    written(tmp_path / "source", tmp_path / "out")
    source, equal = (
        zoo.logits(zoo.load_cleanly(tmp_path / folder).float()) for folder in ("source", "out")
    )
    moved = ((source - equal).square().mean().sqrt() / source.std()).item()
    print(f"{name} {dtype}: logits move by {moved:.1e} of their standard deviation")  # noqa: T201
    assert moved < most
    notices = find_equivalent(
        read_config(tmp_path / "source"), read_index(tmp_path / "source")
    ).notices
    assert any("16" in notice for notice in notices) == name.startswith("gpt_neox")


@pytest.mark.parametrize("name", ["gpt_neox", "gpt_neox-sequential", "gptj", "gpt2", "opt"])
def test_defaults_of_the_source_class_are_written_out(name, tmp_path):
    zoo.save(zoo.build(name), tmp_path / "source")
    kept = json.loads((tmp_path / "source" / "config.json").read_text())
    defaulted = ("token_id", "dropout", "pdrop", "_std", "initializer_range", "use_cache")
    config = {key: value for key, value in kept.items() if not key.endswith(defaulted)}
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    written(tmp_path / "source", tmp_path / "out")
    before, after = (AutoConfig.from_pretrained(tmp_path / name) for name in ("source", "out"))
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "use_cache"):
        assert getattr(before, key, None) == getattr(after, key), key
    names = {"opt": ("init_std", "dropout"), "gpt_neox": ("initializer_range", "hidden_dropout")}
    spread, dropout = names.get(name, ("initializer_range", "resid_pdrop"))
    assert getattr(before, spread) == after.initializer_range
    if hasattr(after, "resid_pdrop"):
        assert getattr(before, dropout) == after.resid_pdrop


@pytest.mark.parametrize("files", [{"vocab.json"}, {"tokenizer.json"}], ids=["vocab", "json"])
@pytest.mark.parametrize("name", ["gpt_neox", "gpt_neox-sequential", "gptj", "gpt2", "opt"])
def test_the_tokenizer_is_found_as_before(name, files, tmp_path):
    """AutoTokenizer goes by the model class; the files of facebook/opt-125m and openai's gpt2."""
    source, out = tmp_path / "source", tmp_path / "out"
    zoo.save(zoo.build(name), source)
    words = ["<s>", "<pad>", "</s>", "<|endoftext|>", *sorted(ByteLevel.alphabet()), "te"]
    vocabulary = {word: number for number, word in enumerate(words)}
    if "vocab.json" in files:
        (source / "vocab.json").write_text(json.dumps(vocabulary))
        (source / "merges.txt").write_text("#version: 0.2\nt e\n")
    else:
        tokenizer = GPT2Tokenizer(vocab=vocabulary, merges=[("t", "e")])
        tokenizer.backend_tokenizer.save(str(source / "tokenizer.json"))
    settings = {"model_max_length": 64}
    if name == "opt":
        ends = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"}
        settings = {**ends, "add_bos_token": True, "tokenizer_class": "GPT2Tokenizer"}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    convert(source, out, num_kv_heads=1)
    before, after = (AutoTokenizer.from_pretrained(folder) for folder in (source, out))
    ids = before("a small text").input_ids
    assert after("a small text").input_ids == ids
    assert (ids[0] == 2) == (name == "opt" and "vocab.json" in files)
    assert after.eos_token == before.eos_token is not None
    assert after.bos_token == before.bos_token
    assert after.decode(ids) == before.decode(ids)


def test_an_unreadable_tokenizer_does_not_stop_a_conversion(tmp_path):
    zoo.save(zoo.build("gpt2"), tmp_path / "source")
    (tmp_path / "source" / "tokenizer.json").write_text('{"version": "1.0"}')
    done = convert(tmp_path / "source", tmp_path / "out", num_kv_heads=1)
    assert any("tokenizer cannot be read" in notice for notice in done.notices)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"version": "1.0"}'


def test_no_class_is_both_mapped_and_refused():
    assert not [name for name in MAPPINGS if refusal(name)]
