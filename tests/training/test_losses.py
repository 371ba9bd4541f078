"""The loss in chunks is the plain loss, and so is its gradient, without the plain one's memory."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gqaconvert.errors import GqaconvertError, UsageError
from gqaconvert.training.logit_losses import LossWeights, TopK, top_k_of
from gqaconvert.training.losses import chunked_loss

N, M, V = 23, 12, 37


def plain_kl(student, teacher, temperature=1.0, top_k=None):
    """Sum of KL × temperature², as one writes it with autograd."""
    p, q = ((each / temperature).softmax(-1) for each in (teacher, student))
    if top_k is not None:
        top = p.topk(top_k, dim=-1).indices
        p, q = (
            torch.cat([each.gather(-1, top), each.scatter(-1, top, 0.0).sum(-1, True)], -1)
            for each in (p, q)
        )
    return torch.special.xlogy(p, p / q).nan_to_num(nan=0.0).sum() * temperature**2


class Parts:
    """Hidden states, a head with a weight and a bias, targets and a teacher's logits."""

    def __init__(self, dtype=torch.float64, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        self.hidden = draw(N, M).requires_grad_()
        self.weight = (draw(V, M) * 0.7).requires_grad_()
        self.bias = draw(V).requires_grad_()
        self.targets = torch.randint(V, (N,), generator=generator)
        self.teacher = draw(N, V) * 2

    def head(self, hidden):
        logits = functional.linear(hidden, self.weight, self.bias)
        return 5 * torch.tanh(logits / 5)  # a cap, as Gemma 2 has

    @property
    def leaves(self):
        return [self.hidden, self.weight, self.bias]

    def gradients(self, loss):
        return torch.autograd.grad(loss, self.leaves)

    def chunked(self, weights, chunk_tokens=None, teacher=True):
        return chunked_loss(
            self.hidden,
            self.targets,
            self.head,
            [self.weight, self.bias],
            weights=weights,
            teacher=(lambda rows: self.teacher[rows]) if teacher else None,
            chunk_tokens=chunk_tokens,
        )


@pytest.mark.parametrize("chunk_tokens", [1, 2, 5, 22, 23, 24, 1000, None])
@pytest.mark.parametrize(
    "weights",
    [
        LossWeights(1.0, 0.0),
        LossWeights(0.0, 1.0),
        LossWeights(0.3, 0.9),
        LossWeights(0.3, 0.9, temperature=2.5),
        LossWeights(0.0, 1.0, top_k=4),
        LossWeights(0.3, 0.9, temperature=0.5, top_k=7),
    ],
    ids=str,
)
def test_loss_and_gradient_are_the_plain_ones(weights, chunk_tokens):
    parts = Parts()
    logits = parts.head(parts.hidden)
    next_token = functional.cross_entropy(logits, parts.targets, reduction="sum")
    distill = plain_kl(logits, parts.teacher, weights.temperature, weights.top_k)
    expected = weights.next_token * next_token + weights.distill * distill
    found = parts.chunked(weights, chunk_tokens)
    torch.testing.assert_close(found.weighted, expected)
    torch.testing.assert_close(found.next_token, next_token)
    torch.testing.assert_close(found.distill, distill)
    torch.testing.assert_close(parts.gradients(found.weighted / 7), parts.gradients(expected / 7))


def test_comparing_all_tokens_as_the_top_k_is_the_whole_divergence():
    parts = Parts()
    whole, top = (parts.chunked(LossWeights(0.0, 1.0, 1.7, k), 5) for k in (None, V))
    torch.testing.assert_close(top.distill, whole.distill)
    torch.testing.assert_close(parts.gradients(top.weighted), parts.gradients(whole.weighted))
    part = parts.chunked(LossWeights(0.0, 1.0, 1.7, 3), 5)
    assert part.distill < whole.distill  # what happens within the rest goes unseen


def test_a_top_k_kept_before_is_that_of_the_logits():
    parts = Parts()
    live = parts.chunked(LossWeights(0.0, 1.0, 2.0, 5), 4)
    top = top_k_of(parts.teacher, 5, 2.0)
    kept = chunked_loss(
        parts.hidden,
        parts.targets,
        parts.head,
        [parts.weight, parts.bias],
        weights=LossWeights(0.0, 1.0, 2.0),
        teacher=lambda rows: TopK(*(each[rows] for each in top)),
        chunk_tokens=4,
    )
    torch.testing.assert_close(kept.weighted, live.weighted)
    torch.testing.assert_close(parts.gradients(kept.weighted), parts.gradients(live.weighted))


def test_a_tied_weight_gets_the_sum_of_both_uses():
    parts = Parts()
    tokens = torch.arange(N) % V

    def hidden():
        return parts.weight[tokens] * 3 + parts.hidden

    logits = parts.head(hidden())
    expected = functional.cross_entropy(logits, parts.targets, reduction="sum")
    expected.backward()
    plain = [leaf.grad.clone() for leaf in parts.leaves]
    for leaf in parts.leaves:
        leaf.grad = None
    for _ in range(2):  # gradients accumulate in .grad as ever
        found = chunked_loss(
            hidden(),
            parts.targets,
            parts.head,
            [parts.weight, parts.bias],
            weights=LossWeights(1.0, 0.0),
            chunk_tokens=5,
        )
        (found.weighted / 2).backward()
    torch.testing.assert_close([leaf.grad for leaf in parts.leaves], plain)


def test_frozen_parameters_get_no_gradient_and_others_theirs():
    parts = Parts()
    whole = parts.gradients(parts.chunked(LossWeights(1.0, 0.5), 5).weighted)
    parts.weight.requires_grad_(False)
    parts.chunked(LossWeights(1.0, 0.5), 5).weighted.backward()
    assert parts.weight.grad is None
    torch.testing.assert_close((parts.hidden.grad, parts.bias.grad), (whole[0], whole[2]))
    head_only = Parts()
    head_only.hidden.requires_grad_(False)
    head_only.chunked(LossWeights(1.0, 0.5), 5).weighted.backward()
    torch.testing.assert_close((head_only.weight.grad, head_only.bias.grad), whole[1:])


def test_a_parameter_that_logits_do_not_depend_on_gets_zeros():
    # so that whoever waits for a gradient of every parameter, as DDP does, is not left waiting
    parts, idle = Parts(), torch.ones(3, requires_grad=True)
    chunked_loss(
        parts.hidden, parts.targets, parts.head, [idle], weights=LossWeights(1.0, 0.0)
    ).weighted.backward()
    assert idle.grad.tolist() == [0, 0, 0]


def test_no_graph_is_built_where_none_is_wanted():
    parts = Parts()
    calls = []

    def head(hidden):
        logits = parts.head(hidden)
        calls.append(logits.requires_grad)
        return logits

    def run():
        return chunked_loss(
            parts.hidden,
            parts.targets,
            head,
            [parts.weight, parts.bias],
            weights=LossWeights(1.0, 0.5),
            teacher=lambda rows: parts.teacher[rows],
            chunk_tokens=5,
        )

    with_graph = run()
    assert all(calls)
    calls.clear()
    with torch.no_grad():
        without = run()
    assert len(calls) == 5
    assert not any(calls)
    assert not without.weighted.requires_grad
    assert not with_graph.distill.requires_grad
    torch.testing.assert_close(without, tuple(each.detach() for each in with_graph))


def test_a_second_backward_pass_is_refused():
    parts = Parts()
    loss = parts.chunked(LossWeights(1.0, 0.0)).weighted
    loss.backward(retain_graph=True)
    with pytest.raises(GqaconvertError, match="second backward"):
        loss.backward()


def test_nothing_counted_gives_zeros():
    parts = Parts()
    found = chunked_loss(
        parts.hidden[:0],
        parts.targets[:0],
        parts.head,
        [parts.weight, parts.bias],
        weights=LossWeights(1.0, 1.0),
    )
    found.weighted.backward()
    assert found.weighted == 0
    assert not any(leaf.grad.any() for leaf in parts.leaves)


@pytest.mark.parametrize("top_k", [None, 20])
def test_tokens_that_the_teacher_rules_out_do_not_spoil_the_loss(top_k):
    parts = Parts()
    parts.teacher[:, 10:] = -torch.inf
    found = parts.chunked(LossWeights(0.0, 1.0, top_k=top_k), 5)
    expected = plain_kl(parts.head(parts.hidden), parts.teacher)
    torch.testing.assert_close(found.distill, expected)
    assert all(each.isfinite().all() for each in parts.gradients(found.weighted))


@pytest.mark.parametrize("top_k", [None, 4])
def test_a_student_that_is_no_number_is_not_hidden(top_k):
    parts = Parts()
    with torch.no_grad():
        parts.hidden[3, 2] = torch.nan
    found = parts.chunked(LossWeights(0.0, 1.0, top_k=top_k), 5)
    assert found.distill.isnan()
    assert found.weighted.isnan()


def test_a_confident_student_keeps_a_finite_loss():
    parts = Parts(torch.float32)
    with torch.no_grad():
        parts.bias[3] = 1e4
    parts.head = lambda hidden: functional.linear(hidden, parts.weight, parts.bias)
    for top_k in (None, 2):
        found = parts.chunked(LossWeights(1.0, 1.0, top_k=top_k), 5)
        assert found.weighted.isfinite()
        assert all(each.isfinite().all() for each in parts.gradients(found.weighted))


def test_bfloat16_autocast_is_close_to_float32():
    parts = Parts(torch.float32)
    weights = LossWeights(0.5, 1.0, 1.5)
    expected = parts.chunked(weights, 5)
    with torch.autocast("cpu", torch.bfloat16):
        found = parts.chunked(weights, 5)
    assert found.weighted.dtype == torch.float32
    torch.testing.assert_close(found.weighted, expected.weighted, rtol=1e-2, atol=0)
    for mine, exact in zip(
        parts.gradients(found.weighted), parts.gradients(expected.weighted), strict=True
    ):
        assert mine.dtype == torch.float32
        assert (mine - exact).norm() < 0.02 * exact.norm()


def test_gradients_of_bfloat16_parameters_add_up_in_float32():
    exact, parts = Parts(), Parts(torch.bfloat16)
    with torch.no_grad():
        for mine, theirs in zip(exact.leaves, parts.leaves, strict=True):
            mine.copy_(theirs)
    weights = LossWeights(1.0, 0.0)
    errors = {}
    for chunk_tokens in (1, N):
        found = parts.gradients(parts.chunked(weights, chunk_tokens).weighted)[1]
        expected = exact.gradients(exact.chunked(weights).weighted)[1]
        errors[chunk_tokens] = float((found.double() - expected).norm() / expected.norm())
    assert errors[1] < 1.5 * errors[N] < 0.05


def test_a_teacher_of_another_vocabulary_is_refused():
    parts = Parts()
    parts.teacher = parts.teacher[:, :-1]
    with pytest.raises(UsageError, match=f"predicts {V - 1} tokens, the student {V}"):
        parts.chunked(LossWeights(0.0, 1.0))


class LargestTensor(TorchDispatchMode):
    """Counts the elements of the largest tensor that any operation puts out."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor):
                self.elements = max(self.elements, leaf.numel())
        return output


@pytest.mark.parametrize("top_k", [None, 4])
def test_no_tensor_is_as_large_as_the_logits_of_all_positions(top_k):
    tokens, vocabulary, chunk_tokens = 500, 300, 25
    hidden = torch.randn(tokens, M, requires_grad=True)
    weight = torch.randn(vocabulary, M, requires_grad=True)
    teacher = torch.randn(tokens, M)
    of_teacher = torch.randn(vocabulary, M)
    with LargestTensor() as largest:
        loss = chunked_loss(
            hidden,
            torch.randint(vocabulary, (tokens,)),
            lambda chunk: chunk @ weight.T,
            [weight],
            weights=LossWeights(0.5, 1.0, 2.0, top_k),
            teacher=lambda rows: teacher[rows] @ of_teacher.T,
            chunk_tokens=chunk_tokens,
        )
        loss.weighted.backward()
    assert largest.elements == chunk_tokens * vocabulary
    with LargestTensor() as largest:
        (hidden @ weight.T).log_softmax(-1)
    assert largest.elements == tokens * vocabulary


def test_gradients_are_let_go_after_the_backward_pass():
    parts = Parts()
    found = parts.chunked(LossWeights(1.0, 0.0), 5)
    kept = weakref.ref(found.weighted.grad_fn.gradients[0])
    found.weighted.backward()
    for leaf in parts.leaves:
        leaf.grad = None
    gc.collect()
    assert kept() is None
