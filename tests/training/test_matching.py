"""Outputs of layers are found in any class, recorded once, compared exactly, and let go."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from zoo import build, text_model

from gqaconvert.errors import UsageError
from gqaconvert.training.matching import (
    StateRecorder,
    attention_modules,
    decoder_layers,
    matching_error,
)

TOKENS = torch.arange(7, 29).reshape(2, 11)


def _states(layers=3, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 5, 8, generator=generator, dtype=dtype) for _ in range(layers)]


def test_error_is_relative_to_the_teachers_square_and_its_gradient_exact():
    teacher, student = _states(seed=0), [each.requires_grad_() for each in _states(seed=1)]
    counted = torch.rand(2, 5) < 0.6
    expected = torch.zeros((), dtype=torch.float64)
    for mine, theirs in zip(student, teacher, strict=True):
        relative = (mine - theirs).square().mean(-1) / theirs.square().mean(-1)
        expected = expected + relative[counted].sum() / 3
    found = matching_error(student, teacher, counted)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found * 5, student), torch.autograd.grad(expected * 5, student)
    )


def test_scale_of_the_layers_does_not_matter():
    teacher, student = _states(seed=0), _states(seed=1)
    counted = torch.ones(2, 5, dtype=torch.bool)
    scaled = ([each * 100 for each in states] for states in (student, teacher))
    torch.testing.assert_close(
        matching_error(*scaled, counted), matching_error(student, teacher, counted)
    )


def test_sums_of_two_batches_are_that_of_one():
    teacher, student = _states(seed=0), _states(seed=1)
    counted = torch.rand(2, 5) < 0.6
    rows = [
        matching_error([s[i : i + 1] for s in student], [t[i : i + 1] for t in teacher], c)
        for i, c in enumerate(counted.split(1))
    ]
    torch.testing.assert_close(sum(rows), matching_error(student, teacher, counted))


def test_teacher_and_student_may_be_in_other_types():
    teacher, student = _states(seed=0, dtype=torch.bfloat16), _states(seed=1, dtype=torch.float32)
    counted = torch.ones(2, 5, dtype=torch.bool)
    mine = [each.bfloat16().requires_grad_() for each in student]
    exact = matching_error([each.double() for each in mine], [t.double() for t in teacher], counted)
    found = matching_error(mine, teacher, counted)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact.double(), rtol=1e-5, atol=0)
    found.backward()
    assert mine[0].grad.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("student", "teacher"),
    [(_states(2), _states(3)), ([], []), (_states(1), [torch.zeros(2, 5, 9)])],
    ids=["other layers", "none", "other width"],
)
def test_states_that_do_not_match_are_refused(student, teacher):
    with pytest.raises(UsageError, match="do not match"):
        matching_error(student, teacher, torch.ones(2, 5, dtype=torch.bool))


@pytest.mark.parametrize(
    ("name", "attentions"),
    [
        ("llama", 2),
        ("gemma2", 2),
        ("phi", 2),
        ("falcon-new", 2),
        ("dbrx", 2),
        ("gpt_neox", 2),
        ("gpt2", 2),
        ("opt", 2),
        ("exaone", 2),
        ("jamba", 2),  # of 4 layers
        ("qwen3_next", 2),  # of 3
        ("gemma3", 2),  # with a tower of as many layers
    ],
)
def test_layers_and_attention_are_found(name, attentions):
    model = text_model(build(name))
    layers = decoder_layers(model)
    assert len(layers) == model.config.get_text_config().num_hidden_layers
    assert len(attention_modules(model, layers)) == attentions
    recorder = StateRecorder.of(model, hidden=True, attention=True)
    with torch.no_grad(), recorder:
        model(input_ids=TOKENS, use_cache=False)
    states = recorder.take()
    width = model.config.get_text_config().hidden_size
    assert {tuple(each.shape) for each in states.hidden} == {(2, 11, width)}
    assert {tuple(each.shape) for each in states.attention} == {(2, 11, width)}
    assert (len(states.hidden), len(states.attention)) == (len(layers), attentions)


def test_recorded_states_are_those_the_class_reports():
    model = build("llama")
    recorder = StateRecorder.of(model, hidden=True, attention=False)
    with torch.no_grad(), recorder:
        reported = model(input_ids=TOKENS, use_cache=False, output_hidden_states=True)
    states = recorder.take()
    torch.testing.assert_close(states.hidden[0], reported.hidden_states[1])
    assert states.attention == ()
    normed = model.model.norm(states.hidden[-1])
    torch.testing.assert_close(normed, reported.hidden_states[-1])


def test_a_model_without_attention_in_its_layers_is_refused():
    model = build("llama")
    layers = decoder_layers(model)
    for layer in layers:
        del layer.self_attn
    with pytest.raises(UsageError, match="no attention"):
        attention_modules(model, layers)
    model.model.layers = torch.nn.ModuleList(list(layers)[:1])
    with pytest.raises(UsageError, match="no list of 2 decoder layers"):
        decoder_layers(model)


def test_nothing_is_recorded_outside_nor_kept_after():
    model = build("llama")
    recorder = StateRecorder.of(model, hidden=True, attention=True)
    model(input_ids=TOKENS, use_cache=False)
    assert recorder.take() == ((), ())
    with recorder:
        model(input_ids=TOKENS, use_cache=False)
    states = recorder.take()
    assert recorder.take() == ((), ())
    kept = weakref.ref(states.hidden[0])
    del states
    gc.collect()
    assert kept() is None
    recorder.close()
    with recorder:
        model(input_ids=TOKENS, use_cache=False)
    assert recorder.take() == ((), ())


def test_a_pass_that_failed_leaves_nothing_to_the_next():
    model = build("llama")
    recorder = StateRecorder.of(model, hidden=True, attention=False)
    model.model.norm.weight = None  # fails after the layers
    with pytest.raises(TypeError), recorder:
        model(input_ids=TOKENS, use_cache=False)
    model.model.norm.weight = torch.nn.Parameter(torch.ones(32))
    with recorder:
        model(input_ids=TOKENS, use_cache=False)
    assert len(recorder.take().hidden) == 2


def test_activation_checkpoints_are_recorded_once_and_give_the_same_gradient():
    gradients = []
    teacher = build("llama", seed=5)
    of_teacher = StateRecorder.of(teacher, hidden=True, attention=True)
    with torch.no_grad(), of_teacher:
        teacher(input_ids=TOKENS, use_cache=False)
    wanted = of_teacher.take()
    counted = torch.ones(2, 11, dtype=torch.bool)
    for checkpointing in (False, True):
        model = build("llama").train()
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        recorder = StateRecorder.of(model, hidden=True, attention=True)
        with recorder:
            model(input_ids=TOKENS, use_cache=False)
        states = recorder.take()
        assert (len(states.hidden), len(states.attention)) == (2, 2)
        loss = matching_error(states.hidden, wanted.hidden, counted)
        (loss + 3 * matching_error(states.attention, wanted.attention, counted)).backward()
        assert recorder.take() == ((), ())  # the layers have run again by now
        gradients.append([each.grad for each in model.parameters()])
    assert sum(each is not None for each in gradients[0]) > 10
    torch.testing.assert_close(gradients[1], gradients[0])


def test_compiled_layers_are_recorded():
    model = build("llama")
    recorder = StateRecorder.of(model, hidden=True, attention=True)
    with torch.no_grad(), recorder:
        model(input_ids=TOKENS, use_cache=False)
    expected = recorder.take()
    for layer in decoder_layers(model):
        layer.compile(backend="eager")
    for _ in range(2):
        with torch.no_grad(), recorder:
            model(input_ids=TOKENS, use_cache=False)
        torch.testing.assert_close(recorder.take(), expected)
    with torch.no_grad():
        model(input_ids=TOKENS, use_cache=False)
    assert recorder.take() == ((), ())
