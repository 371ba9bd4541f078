"""A step's loss and gradient are those of the plain forward pass, for classes of every kind."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from transformers import LlamaForCausalLM
from zoo import MHA_ONLY, ZOO, build, text_model

from gqaconvert.errors import UsageError
from gqaconvert.settings.uptrain import LossSettings, TeacherSettings
from gqaconvert.training.batch import Batch
from gqaconvert.training.losses import LossSums
from gqaconvert.training.objective import Objective
from gqaconvert.training.teacher import Teacher, load_teacher
from gqaconvert.training.teacher_cache import write_teacher_cache

CLASSES = {
    "llama": "plain",
    "gemma2": "logits capped, embedding tied",
    "cohere": "logits scaled, embedding tied",
    "granite": "logits divided",
    "gemma3": "composite",
    "mixtral": "experts",
    "jamba": "state space layers",
    "gpt_neox": "no grouped heads",
    "opt-projected": "a projection before the head",
    "falcon-new": "fused projections",
}


def make(name, heads=1, seed=0, **options):
    entry = {**ZOO, **MHA_ONLY}[name]
    return text_model(build(name, num_kv_heads=entry.legal[-heads], seed=seed, **options))


def make_batch(rows=2, length=11, seed=0):
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(7, 90, (rows, length), generator=generator)
    counted = torch.rand(rows, length, generator=generator) < 0.8
    counted[:, 0] = False
    return Batch(token_ids, counted, None, torch.arange(rows), {})


def plain_sums(student, teacher, batch, temperature=1.0):
    """Sums of cross entropy and of KL × temperature², with all logits at once."""
    counted = batch.counted[:, 1:]
    logits = student(input_ids=batch.token_ids, use_cache=False).logits[:, :-1][counted]
    with torch.no_grad():
        wanted = teacher(input_ids=batch.token_ids, use_cache=False).logits[:, :-1][counted]
    next_token = functional.cross_entropy(logits, batch.token_ids[:, 1:][counted], reduction="sum")
    log_p, log_q = ((each / temperature).log_softmax(-1) for each in (wanted, logits))
    return next_token, (log_p.exp() * (log_p - log_q)).sum() * temperature**2


def gradients(model, loss):
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {
        name: torch.zeros_like(each) if each.grad is None else each.grad
        for name, each in model.named_parameters()
    }


def assert_same(found, expected, tolerance=2e-4):
    assert found.keys() == expected.keys()
    scale = max(float(each.abs().max()) for each in expected.values())
    for name, each in expected.items():
        error = float((found[name] - each).abs().max())
        assert error <= tolerance * max(float(each.abs().max()), 1e-3 * scale), name


@pytest.mark.parametrize("name", CLASSES)
def test_loss_and_gradient_are_the_plain_ones(name):
    student, teacher = make(name, 1, seed=1), make(name, 2 if name in ZOO else 1, seed=0)
    batch = make_batch()
    next_token, distill = plain_sums(student, teacher, batch, 1.5)
    expected = (0.5 * next_token + 2 * distill) / 9
    wanted = gradients(student, expected)
    settings = LossSettings(next_token=0.5, temperature=1.5, chunk_tokens=4)
    objective = Objective(student, settings, teacher=Teacher(teacher))
    assert objective.in_chunks
    found = objective(batch, normaliser=9, distill_weight=2.0)
    assert isinstance(found, LossSums)
    torch.testing.assert_close(found.next_token, next_token.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.distill, distill.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.total, expected, rtol=1e-5, atol=1e-5)
    assert found.counted == batch.counted.sum() == batch.num_counted
    assert_same(gradients(student, found.total), wanted)


def test_the_embedding_is_tied_in_some_of_these_classes():
    assert make("gemma2").config.tie_word_embeddings
    assert not make("llama").config.tie_word_embeddings


def test_a_class_that_cannot_be_split_is_read_at_once():
    class Odd(LlamaForCausalLM):
        """Its logits depend on the tokens beside the hidden states."""

        def forward(self, input_ids, **options):
            output = super().forward(input_ids=input_ids, **options)
            output.logits = output.logits + self.lm_head.weight[input_ids].mean(-1, True).square()
            return output

    student, teacher = (Odd(make("llama").config).eval() for _ in range(2))
    batch = make_batch()
    next_token, distill = plain_sums(student, teacher, batch)
    wanted = gradients(student, (next_token + distill) / 5)
    settings = LossSettings(next_token=1.0, chunk_tokens=4)
    objective = Objective(student, settings, teacher=Teacher(teacher))
    assert not objective.in_chunks
    found = objective(batch, normaliser=5, distill_weight=1.0)
    torch.testing.assert_close(found.distill, distill.detach())
    assert_same(gradients(student, found.total), wanted)


def test_micro_batches_add_up_to_one_large_batch():
    student, teacher = make("llama", seed=1), make("llama", 2)
    settings = LossSettings(next_token=0.5, hidden=0.7, attention=0.3)
    objective = Objective(student, settings, teacher=Teacher(teacher))
    batch = make_batch(rows=3)
    whole = objective(batch, normaliser=batch.num_counted, distill_weight=1.0)
    wanted = gradients(student, whole.total)
    parts = []
    for rows in (slice(0, 2), slice(2, 3)):
        part = Batch(
            batch.token_ids[rows], batch.counted[rows], None, batch.sequence_numbers[rows], {}
        )
        parts.append(objective(part, normaliser=batch.num_counted, distill_weight=1.0))
    found = LossSums(*(sum(each) for each in zip(*parts, strict=True)))
    torch.testing.assert_close(found, whole)
    assert_same(gradients(student, found.total), wanted)


def test_matching_is_zero_against_itself_and_pulls_towards_the_teacher():
    settings = LossSettings(distill=0.0, hidden=1.0, attention=1.0)
    student = make("llama", seed=1)
    batch = make_batch()
    same = Objective(student, settings, teacher=Teacher(make("llama", seed=1)))
    found = same(batch, normaliser=batch.num_counted, distill_weight=0.0)
    assert (found.hidden, found.attention) == (0, 0)
    assert found.total == 0
    objective = Objective(student, settings, teacher=Teacher(make("llama", 2)))
    optimiser = torch.optim.SGD(student.parameters(), lr=0.02)
    before = objective(batch, normaliser=batch.num_counted, distill_weight=0.0)
    assert before.hidden > 0 < before.attention
    assert before.distill == 0
    torch.testing.assert_close(before.total, (before.hidden + before.attention) / batch.num_counted)
    for _ in range(5):
        optimiser.zero_grad()
        objective(batch, normaliser=batch.num_counted, distill_weight=0.0).total.backward()
        optimiser.step()
    after = objective(batch, normaliser=batch.num_counted, distill_weight=0.0)
    assert after.total < 0.9 * before.total


@pytest.mark.parametrize("matching", [0.0, 0.5])
def test_activation_checkpoints_change_nothing(matching):
    settings = LossSettings(next_token=1.0, hidden=matching, attention=matching)
    batch, found = make_batch(), []
    for checkpointing in (False, True):
        student = make("llama", seed=1).train()
        if checkpointing:
            student.activation_checkpointing_enable()
            assert student.is_activation_checkpointing
        objective = Objective(student, settings, teacher=Teacher(make("llama", 2)))
        sums = objective(batch, normaliser=9, distill_weight=1.0)
        found.append((sums.total.detach(), gradients(student, sums.total)))
    torch.testing.assert_close(found[0][0], found[1][0])
    assert_same(found[1][1], found[0][1], 1e-5)


def test_the_teacher_is_frozen_and_no_part_of_what_is_trained():
    student, source = make("llama", seed=1), make("llama", 2).train()
    before = {name: each.clone() for name, each in source.state_dict().items()}
    teacher = Teacher(source)
    settings = LossSettings(next_token=1.0, hidden=1.0, attention=1.0)
    objective = Objective(student, settings, teacher=teacher)
    names = {f"model.{name}" for name, _ in student.named_parameters()}
    assert {name for name, _ in objective.named_parameters()} == names
    assert objective.state_dict().keys() == {f"model.{name}" for name in student.state_dict()}
    objective.train()
    assert student.training
    assert not source.training
    objective(make_batch(), normaliser=9, distill_weight=1.0).total.backward()
    assert all(each.grad is not None for each in student.parameters())
    assert not any(each.requires_grad for each in source.parameters())
    assert all(each.grad is None for each in source.parameters())
    torch.testing.assert_close(dict(source.state_dict()), before, rtol=0, atol=0)


def test_a_teacher_is_loaded_in_the_type_asked_for():
    settings = LossSettings(next_token=0.0)
    teacher = load_teacher("tiny", TeacherSettings(dtype="bfloat16"))
    assert {each.dtype for each in teacher.model.parameters()} == {torch.bfloat16}
    student = load_teacher("tiny", TeacherSettings(dtype="float32")).model
    student.requires_grad_(True)
    objective = Objective(student, settings, teacher=teacher)
    batch = make_batch(length=40)
    with torch.no_grad():
        found = objective(batch, normaliser=batch.num_counted, distill_weight=1.0)
    assert not found.total.requires_grad
    assert 0 < found.distill / found.counted < 1e-2  # what bfloat16 costs


def test_a_teacher_that_is_not_needed_is_not_run():
    teacher = Teacher(make("llama", 2))
    runs = []
    teacher.module.register_forward_hook(lambda *_: runs.append(1))
    objective = Objective(make("llama"), LossSettings(next_token=1.0), teacher=teacher)
    found = objective(make_batch(), normaliser=9, distill_weight=0.0)
    assert (len(runs), float(found.distill)) == (0, 0.0)
    objective(make_batch(), normaliser=9, distill_weight=0.1)
    assert len(runs) == 1


def test_dropout_does_not_hide_the_body():
    student = make("gpt2").train()
    assert student.transformer.drop.p > 0
    objective = Objective(student, LossSettings(next_token=1.0, distill=0.0))
    assert objective.in_chunks
    assert student.training


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "cohere2", "mistral", "gpt_neox"])
def test_documents_packed_together_do_not_see_each_other(name, attn):
    student, teacher = make(name, seed=1), make(name)
    for model in (student, teacher):
        model.set_attn_implementation(attn)
    settings = LossSettings(next_token=0.5)
    objective = Objective(student, settings, teacher=Teacher(teacher), separate_documents=True)
    batch = make_batch(rows=3, length=17)
    lengths = ((6, 11), (17,), (1, 9, 7))  # one row with a single document
    positions = [torch.cat([torch.arange(n) for n in row]) for row in lengths]
    counted = batch.counted & torch.stack(positions).bool()
    packed = Batch(batch.token_ids, counted, torch.stack(positions), batch.sequence_numbers, {})
    found = objective(packed, normaliser=9, distill_weight=1.0)
    wanted = []
    for row, numbers in enumerate(lengths):
        begin = 0
        for length in numbers:
            place = (slice(row, row + 1), slice(begin, begin + length))
            alone = Batch(batch.token_ids[place], counted[place], None, torch.arange(1), {})
            wanted.append(objective(alone, normaliser=9, distill_weight=1.0))
            begin += length
    expected = LossSums(*(sum(each) for each in zip(*wanted, strict=True)))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert_same(gradients(student, found.total), gradients(student, expected.total))
    together = objective(
        Batch(batch.token_ids, counted, None, batch.sequence_numbers, {}),
        normaliser=9,
        distill_weight=1.0,
    )
    difference = (together.total - found.total).abs()
    assert difference > 3e-4 * found.total


@pytest.mark.parametrize("name", ["jamba", "bloom", "gpt_oss"])
def test_a_class_that_cannot_keep_documents_apart_is_refused(name):
    # layers with a state; no positions at all; positions that its masks do not heed
    with pytest.raises(UsageError, match="cannot keep packed documents apart"):
        Objective(make(name), LossSettings(next_token=1.0, distill=0.0), separate_documents=True)


def test_documents_in_one_flat_row_are_the_same():
    # as flash attention reads them, here through eager attention
    from gqaconvert.training import split_model

    model = make("llama")
    split = split_model.SplitModel(model, split_model.find_body_name(model))
    batch = make_batch(rows=2, length=12)
    positions = torch.cat([torch.arange(5), torch.arange(7)]).repeat(2, 1)
    with torch.no_grad():
        expected = split.hidden(batch.token_ids, positions)
        model.config._attn_implementation_internal = "flash_attention_2"
        seen = []

        def note(_, args, given):
            seen.append(given["input_ids"].shape)
            model.config._attn_implementation_internal = "eager"

        hook = split.body.register_forward_pre_hook(note, with_kwargs=True)
        found = split.hidden(batch.token_ids, positions)
        hook.remove()
    assert seen == [(1, 24)]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_predictions_kept_before_stand_in_for_the_teacher(tmp_path):
    source, batch = make("llama", 2), make_batch(rows=3)
    cache = write_teacher_cache(
        tmp_path / "cache", Teacher(source), [batch], 3, 96, {"teacher": "x"}, temperature=1.5
    )
    found = {}
    for name, teacher in (("live", Teacher(source)), ("kept", cache)):
        student = make("llama", seed=1)
        for top_k in (None, 10):
            settings = LossSettings(temperature=1.5, top_k=top_k)
            objective = Objective(student, settings, teacher=teacher)
            sums = objective(batch, normaliser=9, distill_weight=1.0)
            found[name, top_k] = (sums, gradients(student, sums.total))
    for top_k in (None, 10):
        (live, wanted), (kept, got) = found["live", top_k], found["kept", top_k]
        torch.testing.assert_close(kept, live, rtol=2e-3, atol=0)  # float16
        assert_same(got, wanted, 2e-2)
    assert found["live", 10][0].distill < 0.99 * found["live", None][0].distill


def test_a_teacher_kept_before_is_as_far_from_itself_as_rounding(tmp_path):
    source, batch = make("llama", 2), make_batch(rows=3)
    for top_k in (4, 96):
        cache = write_teacher_cache(
            tmp_path / str(top_k), Teacher(source), [batch], 3, top_k, {"teacher": "x"}
        )
        objective = Objective(source.requires_grad_(True), LossSettings(), teacher=cache)
        found = objective(batch, normaliser=9, distill_weight=1.0)
        # Log-probabilities that do not add up to 1 would fall below 0.
        assert 0 <= found.distill < 1e-4 * found.counted


def test_a_cache_that_does_not_go_with_the_loss_is_refused(tmp_path):
    cache = write_teacher_cache(
        tmp_path / "cache", Teacher(make("llama", 2)), [make_batch(rows=1)], 1, 8, {}
    )
    for wrong, fault in (
        (LossSettings(temperature=2.0), "temperature 1, the loss wants 2"),
        (LossSettings(top_k=9), "holds 8 tokens a position, the loss wants 9"),
        (LossSettings(hidden=1.0), "no hidden states"),
    ):
        with pytest.raises(UsageError, match=fault):
            Objective(make("llama"), wrong, teacher=cache)
    Objective(make("llama"), LossSettings(top_k=8), teacher=cache)


def test_a_teacher_that_is_missing_or_speaks_another_language_is_refused():
    with pytest.raises(UsageError, match="needs a teacher"):
        Objective(make("llama"), LossSettings())
    with pytest.raises(UsageError, match="the teacher predicts 2048 tokens, the student 96"):
        Objective(make("llama"), LossSettings(), teacher=load_teacher("tiny", TeacherSettings()))


def test_bfloat16_autocast_is_close():
    student, teacher = make("llama", seed=1), make("llama", 2)
    settings = LossSettings(next_token=0.5, hidden=0.1, attention=0.1, chunk_tokens=4)
    objective = Objective(student, settings, teacher=Teacher(teacher))
    exact = objective(make_batch(), normaliser=9, distill_weight=1.0)
    wanted = gradients(student, exact.total)
    with torch.autocast("cpu", torch.bfloat16):
        found = objective(make_batch(), normaliser=9, distill_weight=1.0)
    torch.testing.assert_close(found, exact, rtol=3e-2, atol=0)
    got = gradients(student, found.total)
    for name in ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"):
        assert got[name].dtype == torch.float32
        assert (got[name] - wanted[name]).norm() < 0.05 * wanted[name].norm(), name
