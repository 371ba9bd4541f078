"""The estimate of memory against what torch allocates, and what is said when it does not fit."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from live_bytes import LiveBytes
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from gqaconvert.errors import RefusedError
from gqaconvert.kv_cache.model_config import parse_config
from gqaconvert.settings.uptrain import LossSettings, UptrainSettings
from gqaconvert.training.adapters import add_adapters
from gqaconvert.training.batch import Batch
from gqaconvert.training.disk import estimate_disk
from gqaconvert.training.logit_losses import LossWeights
from gqaconvert.training.losses import CHUNK_TOKENS as CHUNKS_OF_LOSSES
from gqaconvert.training.losses import chunked_loss
from gqaconvert.training.memory import CHUNK_TOKENS, Devices, estimate_memory
from gqaconvert.training.memory_parts import (
    element_bytes,
    logits_bytes,
    saved_a_token,
    trained_parameters,
)
from gqaconvert.training.memory_remedies import memory_shortage
from gqaconvert.training.model_facts import model_facts
from gqaconvert.training.objective import Objective
from gqaconvert.training.optimiser import make_optimiser
from gqaconvert.training.teacher import Teacher

GIB = 2**30
SMALL = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip


def facts_of(**config):
    raw = {"model_type": "llama", "tie_word_embeddings": False, **SMALL, **config}
    return model_facts(parse_config(raw, "config.json"))


def settings(**changes):
    return UptrainSettings.model_validate(
        {
            "data": {"datasets": [{"path": "bundled"}], "context": 256},
            "budget": {"steps": 10},
            "batch_tokens": 1024,
            "micro_batch": 2,
            "lr": 1e-4,
            "loss": {"distill": 1.0},
            **changes,
        }
    )


LLAMA2_7B = parse_config(
    {
        "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32,
        "intermediate_size": 11008, "num_attention_heads": 32, "max_position_embeddings": 4096,
    },
    "config.json",
)  # fmt: skip


def a_7b(kv_heads=8, **changes):
    data = {"datasets": [{"path": "bundled"}], "context": 4096}
    wanted = settings(**{"data": data, "batch_tokens": 128 * 4096, **changes})
    return wanted, model_facts(LLAMA2_7B, kv_heads), model_facts(LLAMA2_7B)


# --- against what torch allocates ---


def build(cls=LlamaForCausalLM, config=LlamaConfig, **changes):
    torch.manual_seed(0)
    return cls(config(**{**SMALL, "tie_word_embeddings": False, **changes}))


def measure(wanted, model, teacher=None):
    """Bytes by part of a second step of real training, whose first makes the optimiser's state."""
    held = torch.bfloat16 if wanted.precision == "pure-bf16" else torch.float32
    objective = Objective(model.to(held), wanted.loss, teacher=teacher).train()
    if wanted.activation_checkpointing:
        model.activation_checkpointing_enable()
    optimiser = make_optimiser(model, wanted)
    sequences, context = wanted.micro_batch, wanted.data.context
    batch = Batch(
        torch.randint(SMALL["vocab_size"], (sequences, context)),
        torch.ones(sequences, context, dtype=torch.bool),
        None,
        torch.arange(sequences),
        {},
    )

    def step():
        for _ in range(wanted.batch_sequences // sequences):
            with torch.autocast("cpu", torch.bfloat16, enabled=wanted.precision == "bf16"):
                sums = objective(batch, normaliser=100.0, distill_weight=wanted.loss.distill)
            sums.total.backward()
        gradients = [each.grad for each in model.parameters()]
        size = sum(each.nbytes for each in gradients if each is not None)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        return size

    gradients = step()
    states = [value for state in optimiser.state.values() for value in state.values()]
    standing = [*model.parameters(), *states]
    if teacher is not None:
        standing += teacher.model.parameters()
    with LiveBytes(standing) as live:
        step()
    sizes = {
        "weights": sum(each.nbytes for each in model.parameters()),
        "gradients": gradients,
        "optimiser": sum(each.nbytes for each in states),
        "teacher": sum(each.nbytes for each in teacher.model.parameters()) if teacher else 0,
    }
    return {**sizes, "peak": live.peak}


def peak(estimate):
    """What comes and goes in a step, and the teacher, whose last states are counted with it."""
    return estimate.total - estimate.unusable - estimate.weights - estimate.optimiser


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "bf16"},
        {"precision": "bf16", "activation_checkpointing": True},
        {"precision": "bf16", "batch_tokens": 512, "loss": {"next_token": 1.0, "distill": 0.0}},
        {"precision": "fp32", "batch_tokens": 512},
        {"precision": "fp32", "activation_checkpointing": True, "micro_batch": 4},
        {"precision": "pure-bf16"},
        {"precision": "pure-bf16", "loss": {"distill": 1.0, "next_token": 0.5, "chunk_tokens": 64}},
        {"lora": {}, "activation_checkpointing": True},
        {"loss": {"distill": 1.0, "hidden": 1.0}},
    ],
    ids=lambda changes: " ".join(f"{key}={value}" for key, value in changes.items()),
)
def test_a_step_takes_what_was_estimated(changes):
    wanted = settings(**changes)
    teacher = None
    if wanted.loss.needs_teacher:
        teacher = Teacher(build(num_key_value_heads=8).to(torch.bfloat16))
    model = build()
    if wanted.lora is not None:
        pytest.importorskip("peft")
        add_adapters(model, wanted.lora)
    found = measure(wanted, model, teacher)
    teacher_facts = facts_of(num_key_value_heads=8)
    estimate = estimate_memory(wanted, facts_of(), teacher_facts, Devices(kind="cpu"))
    assert estimate.weights == found["weights"]
    assert estimate.gradients == found["gradients"]
    assert estimate.optimiser == pytest.approx(found["optimiser"], rel=0.001)
    assert bool(estimate.teacher_bytes) == bool(teacher)
    assert peak(estimate) == pytest.approx(found["peak"] + found["teacher"], rel=0.1)


@pytest.mark.parametrize("precision", ["bf16", "fp32", "pure-bf16"])
@pytest.mark.parametrize(
    ("cls", "config", "changes"),
    [
        (LlamaForCausalLM, LlamaConfig, {}),
        (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 8, "hidden_size": 512}),
        (LlamaForCausalLM, LlamaConfig, {"attn_implementation": "eager"}),
        (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 32}),
    ],
    ids=["llama", "llama-mha", "llama-eager", "qwen3"],
)
def test_layers_save_what_was_estimated(precision, cls, config, changes):
    """The activations of layers, apart from everything else a step holds."""
    few, many = (activations(cls, config, precision, layers, changes) for layers in (2, 6))
    attention = changes.get("attn_implementation", "sdpa")
    wanted = settings(precision=precision, attention=attention)
    raw = {key: value for key, value in changes.items() if key != "attn_implementation"}
    facts = facts_of(model_type=config.model_type, **raw)
    a_token = saved_a_token(facts, element_bytes(wanted, sharded=False), wanted)
    assert a_token == pytest.approx((many - few) / 4, rel=0.03)


def activations(cls, config, precision, layers, changes):
    """Bytes a token that are left after a forward pass, without copies of weights."""
    model = build(cls, config, num_hidden_layers=layers, **changes)
    model = model.bfloat16() if precision == "pure-bf16" else model
    tokens = torch.randint(4096, (2, 256))
    cast = precision == "bf16"
    with LiveBytes(model.parameters()) as live, torch.autocast("cpu", torch.bfloat16, cast):
        hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
        left = live.live
    assert hidden.requires_grad
    copies = 2 * sum(each.numel() for name, each in model.named_parameters() if "_proj" in name)
    return (left - cast * copies) / tokens.numel()


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_shape_of_a_7b_model_takes_what_was_estimated(checkpointing):
    """Fake tensors: shapes without memory. They always have a mask, as documents apart do."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    context = 2048
    wanted, facts, _ = a_7b(
        data={"datasets": [{"path": "x"}], "context": context, "separate_documents": True},
        batch_tokens=2 * context, micro_batch=2, activation_checkpointing=checkpointing,
    )  # fmt: skip
    with FakeTensorMode():
        model = LlamaForCausalLM(LlamaConfig(num_key_value_heads=8))
        assert sum(each.numel() for each in model.parameters()) == facts.parameters
        if checkpointing:
            model.activation_checkpointing_enable()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        standing = [*model.parameters(), *(each.grad for each in model.parameters())]
        with LiveBytes(standing) as live:
            with torch.autocast("cpu", torch.bfloat16):
                hidden = model.model(
                    input_ids=torch.randint(32000, (2, context)), use_cache=False
                ).last_hidden_state
            live.peak = live.live  # copies that autocast made for the forward pass are gone
            hidden.backward(torch.zeros_like(hidden))
    estimate = estimate_memory(wanted, facts)
    casts = 2 * facts.active_matrices // (facts.num_layers if checkpointing else 1)
    assert estimate.activations + casts == pytest.approx(live.peak, rel=0.05)


@pytest.mark.parametrize("loss", [{"distill": 1.0}, {"distill": 0.5, "next_token": 0.5}])
def test_a_chunk_of_logits_takes_what_was_estimated(loss):
    """A wide vocabulary over a narrow model, so that logits are nearly all there is."""
    vocabulary, chunk = 16384, 256
    wanted = LossSettings(**loss, chunk_tokens=chunk)
    hidden = torch.randn(512, 64, requires_grad=True)
    head, of_teacher = (torch.randn(vocabulary, 64, requires_grad=True) for _ in range(2))
    weights = LossWeights(next_token=wanted.next_token, distill=wanted.distill)
    with LiveBytes([hidden, head, of_teacher]) as live:
        chunked_loss(
            hidden, torch.randint(vocabulary, (512,)), lambda rows: rows @ head.T, [head],
            weights=weights, chunk_tokens=chunk,
            teacher=lambda rows: hidden[rows].detach() @ of_teacher.detach().T,
        )  # fmt: skip
    facts = facts_of(vocab_size=vocabulary, hidden_size=64)
    asked = settings(precision="fp32", loss=wanted)
    found = logits_bytes(asked, facts, element_bytes(asked, sharded=False), chunk, 4)
    assert found == pytest.approx(live.peak, rel=0.1)


def test_chunks_are_those_of_the_losses():
    assert CHUNK_TOKENS == CHUNKS_OF_LOSSES


# --- what follows from the recipe ---


def test_a_7b_model_with_its_teacher_fits_on_eight_gpus_with_fsdp2():
    wanted, student, teacher = a_7b(activation_checkpointing=True)
    estimate = estimate_memory(wanted, student, teacher, Devices(8, sharded=True), 80 * GIB)
    assert student.parameters == 5_933_109_248  # of 6.74 billion: K and V are a quarter
    assert estimate.weights == 4 * student.parameters // 8
    assert estimate.optimiser == 2 * estimate.weights
    assert estimate.fits
    assert 15 * GIB < estimate.total < 40 * GIB
    assert memory_shortage(estimate) is None


def test_parts_in_words_name_every_part():
    wanted, student, teacher = a_7b()
    rows = dict(estimate_memory(wanted, student, teacher, Devices(8, True), 80 * GIB).rows())
    assert set(rows) == {
        "weights", "gathered and cast weights", "gradients", "optimiser", "teacher", "activations",
        "logits", "context and fragments", "at most at one time", "device",
    }  # fmt: skip
    assert rows["weights"] == "2.76 GiB"
    assert rows["device"] == "80 GiB"


@pytest.mark.parametrize(
    ("part", "less"),
    [
        ("activations", {"activation_checkpointing": True}),
        ("activations", {"micro_batch": 1}),
        ("logits", {"loss": {"chunk_tokens": 64}}),
        ("logits", {"stages": [{"share": 1.0, "train": "attention"}]}),
        ("teacher_bytes", {"teacher": {"cache": "folder"}}),
        ("optimiser", {"precision": "pure-bf16"}),
        ("gradients", {"lora": {}}),
        ("optimiser", {"lora": {}}),
        ("gradients", {"stages": [{"share": 1.0, "train": "kv"}]}),
    ],
)
def test_what_saves_memory_saves_it_in_its_part(part, less):
    before, after = (
        getattr(estimate_memory(*a_7b(**changes)), part) for changes in ({"micro_batch": 2}, less)
    )
    assert after < before


def test_gradients_of_copies_exist_twice_while_micro_batches_add_up():
    gradients = [
        estimate_memory(*a_7b(batch_tokens=batch * 4096), devices).gradients
        for batch, devices in (
            (4, Devices(2)), (64, Devices(2)), (64, Devices(2, sharded=True)), (64, Devices(1)),
        )
    ]  # fmt: skip
    once = gradients[0]
    assert gradients == [once, 2 * once, once // 2, once]


def test_adapters_are_counted_as_peft_puts_them_in():
    pytest.importorskip("peft")
    for lora in ({}, {"target": "attention"}, {"train_kv": False, "rank": 4}):
        model = build()
        wanted = settings(lora=lora)
        add_adapters(model, wanted.lora)
        trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
        assert trained_parameters(wanted, facts_of()) == trained


# --- refusals ---


def test_a_refusal_says_what_would_fit_and_it_does():
    wanted, student, teacher = a_7b(micro_batch=2)
    estimate = estimate_memory(wanted, student, teacher, Devices(8, sharded=True), 40 * GIB)
    error = memory_shortage(estimate)
    assert isinstance(error, RefusedError)
    assert error.exit_code == 4
    assert "66.9 GiB on each device, which has 40 GiB: weights 2.76 GiB" in error.what
    assert error.remedy.startswith("activation_checkpointing: true (")
    again = estimate_memory(
        wanted.model_copy(update={"activation_checkpointing": True}),
        student, teacher, Devices(8, sharded=True), 40 * GIB,
    )  # fmt: skip
    assert again.fits


def test_one_gpu_is_told_of_more_and_of_adapters():
    wanted, student, teacher = a_7b(micro_batch=2)
    error = memory_shortage(estimate_memory(wanted, student, teacher, Devices(1), 80 * GIB))
    count = int(re.match(r"(\d+) processes with FSDP2 \(", error.remedy)[1])
    devices = Devices(count, sharded=True)
    assert estimate_memory(wanted, student, teacher, devices, 80 * GIB).fits
    fewer = Devices(count // 2, sharded=True)
    assert not estimate_memory(wanted, student, teacher, fewer, 80 * GIB).fits
    assert "lora: {} and activation_checkpointing: true" in error.remedy


def test_two_changes_are_named_together_where_one_is_not_enough():
    wanted, student, teacher = a_7b(micro_batch=8)
    devices = Devices(8, sharded=True)
    error = memory_shortage(estimate_memory(wanted, student, teacher, devices, 24 * GIB))
    assert "micro_batch: 1 and activation_checkpointing: true (" in error.remedy


def test_where_nothing_fits_it_says_so():
    wanted, student, teacher = a_7b()
    error = memory_shortage(estimate_memory(wanted, student, teacher, Devices(1), GIB))
    assert "a smaller model or larger devices" in error.remedy


def test_unknown_memory_is_not_refused():
    assert memory_shortage(estimate_memory(*a_7b())) is None


# --- facts and disk ---


@pytest.mark.parametrize("kv_heads", [8, 1])
def test_facts_after_conversion_are_those_of_the_converted_model(kv_heads):
    converted = parse_config({**LLAMA2_7B.raw, "num_key_value_heads": kv_heads}, "config.json")
    assert model_facts(LLAMA2_7B, kv_heads) == model_facts(converted)


def test_facts_of_a_class_that_cannot_be_counted_are_none():
    assert model_facts(dataclasses.replace(LLAMA2_7B, text_model_type="zamba2")) is None


def test_disk_holds_states_export_and_cache():
    wanted, student, _ = a_7b(
        checkpoints={"keep": 2}, teacher={"cache": "folder", "cache_top_k": 10}
    )
    disk = estimate_disk(wanted, student, "bfloat16", total_steps=100)
    assert disk.states == 3 * 12 * student.parameters
    assert disk.export == disk.converted == 2 * student.parameters
    assert disk.teacher_cache == 100 * 128 * 4096 * 10 * 6
    assert disk.total == disk.states + 2 * disk.export + disk.teacher_cache
    started = wanted.model_copy(update={"start": "folder", "export_dtype": "float32"})
    disk = estimate_disk(started, student, "bfloat16", total_steps=100)
    assert disk.converted == 0
    assert disk.export == 4 * student.parameters
