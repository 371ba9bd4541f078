"""What a step minimises, as one module: student in, sums of losses out.

Wrappers for data parallelism wrap this module, so all that touches the student's parameters happens
in its forward pass. The teacher hangs on it without being a part of it.
"""

from __future__ import annotations

from typing import Any

import torch

from gqaconvert.errors import UsageError
from gqaconvert.settings.uptrain import LossSettings
from gqaconvert.training.batch import Batch
from gqaconvert.training.logit_losses import LossWeights, TopK
from gqaconvert.training.losses import LossSums, TeacherRows, chunked_loss
from gqaconvert.training.matching import MatchedStates, StateRecorder, matching_error
from gqaconvert.training.split_model import SplitModel, find_body_name
from gqaconvert.training.teacher import Teacher
from gqaconvert.training.teacher_cache import TeacherCache

_ONLY_NEXT_TOKEN = LossSettings(next_token=1.0, distill=0.0)


def predicting(batch: Batch) -> torch.Tensor:
    """Positions that predict a counted token, (B, T), bool."""
    positions = torch.zeros_like(batch.counted)
    positions[:, :-1] = batch.counted[:, 1:]
    return positions


def counted_places(batch: Batch, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where these positions are among all B·T, (N,), and the tokens they predict, (N,)."""
    places = positions.flatten().nonzero().squeeze(1)
    return places, batch.token_ids.roll(-1, dims=1).flatten()[places]


def cross_entropy_of(teacher: Teacher, batch: Batch) -> torch.Tensor:
    """Sum of a teacher's own negative log-likelihood of the counted tokens in nats, ()."""
    places, targets = counted_places(batch, predicting(batch))
    hidden, _ = teacher.hidden(batch)
    weights = LossWeights(next_token=1.0, distill=0.0)
    chosen = hidden.flatten(0, 1)[places]
    return chunked_loss(chosen, targets, teacher.logits, [], weights=weights).next_token


class Objective(torch.nn.Module):
    """The loss of a student.

    Build it on the whole model, before anything is wrapped: a few tokens are run to find the
    model's body and to check what was asked for.

    Args:
        student: a causal language model of transformers, or one with adapters of peft.
        settings: what is minimised.
        teacher: the source, or what it predicted before.
        separate_documents: batches will have positions, which must keep documents apart.

    Attributes:
        model: the student.

    Raises:
        UsageError: a teacher is missing or does not go with the student or the settings, or
            documents cannot be kept apart.
    """

    def __init__(
        self,
        student: Any,  # noqa: ANN401
        settings: LossSettings,
        *,
        teacher: Teacher | TeacherCache | None = None,
        separate_documents: bool = False,
    ) -> None:
        super().__init__()
        self.model = student
        self._settings = settings
        self._teacher = teacher  # no module itself, so that nobody registers the ones in it
        self._body_name = find_body_name(student)
        split = SplitModel(student, self._body_name)
        _check_teacher(teacher, settings, split.vocabulary())
        if separate_documents:
            _check_documents(split)
            if isinstance(teacher, Teacher):
                teacher.check_documents_apart()
        self._recorder = StateRecorder()
        if settings.hidden or settings.attention:
            wanted = {"hidden": bool(settings.hidden), "attention": bool(settings.attention)}
            self._recorder = StateRecorder.of(student, **wanted)
            if isinstance(teacher, Teacher):
                teacher.record(**wanted)

    @property
    def in_chunks(self) -> bool:
        """Whether logits are made in chunks; else all of a micro-batch exist at once."""
        return self._body_name is not None

    def forward(
        self,
        batch: Batch,
        *,
        normaliser: float = 1.0,
        distill_weight: float = 0.0,
        only_next_token: bool = False,
    ) -> LossSums:
        """Losses of a micro-batch on the student's device.

        Args:
            batch: what to read.
            normaliser: what `total` is divided by: the counted tokens of the whole step, over all
                its micro-batches and processes. Gradients of all of them then add up to that of
                one large batch; where a wrapper averages over processes instead, divide by the
                number of processes.
            distill_weight: of the divergence, in place of `settings.distill`; at 0 the teacher is
                not asked for it.
            only_next_token: measure the cross entropy and nothing else, whatever the settings.
        """
        settings = _ONLY_NEXT_TOKEN if only_next_token else self._settings
        counted = predicting(batch)
        places, targets = counted_places(batch, counted)
        teacher, of_teacher = self._ask_teacher(batch, places, settings, bool(distill_weight))
        split = SplitModel(self.model, self._body_name)
        with self._recorder:
            hidden = split.hidden(batch.token_ids, batch.position_ids)
        of_student = self._recorder.take()
        sums = chunked_loss(
            hidden.flatten(0, 1)[places],
            targets,
            split.logits,
            split.head_parameters(),
            weights=LossWeights(
                next_token=settings.next_token / normaliser,
                distill=distill_weight / normaliser,
                temperature=settings.temperature,
                top_k=settings.top_k,
            ),
            teacher=teacher,
            chunk_tokens=settings.chunk_tokens,
        )
        zero = torch.zeros_like(sums.next_token)
        matched = [
            matching_error(mine, theirs, counted) if weight else zero
            for weight, mine, theirs in (
                (settings.hidden, of_student.hidden, of_teacher.hidden),
                (settings.attention, of_student.attention, of_teacher.attention),
            )
        ]
        # The large gradients, those of logits and head, are made with the normaliser in them.
        states = settings.hidden * matched[0] + settings.attention * matched[1]
        return LossSums(
            next_token=sums.next_token,
            distill=sums.distill,
            hidden=matched[0].detach(),
            attention=matched[1].detach(),
            counted=counted.sum(),
            total=sums.weighted + states / normaliser,
        )

    def _ask_teacher(
        self, batch: Batch, places: torch.Tensor, settings: LossSettings, distill: bool
    ) -> tuple[TeacherRows | None, MatchedStates]:
        """Return what predicts ranges of `places`, and the states to match."""
        nothing = MatchedStates((), ())
        teacher = self._teacher
        if isinstance(teacher, TeacherCache):
            if not distill:
                return None, nothing
            top = _at_places(*teacher.read(batch.sequence_numbers), places, self._settings.top_k)
            return (lambda rows: TopK(*(each[rows] for each in top))), nothing
        needed = distill or settings.hidden or settings.attention
        if teacher is None or not needed:
            return None, nothing
        hidden, states = teacher.hidden(batch)
        if not distill:
            return None, states
        chosen = hidden.flatten(0, 1)[places]
        return (lambda rows: teacher.logits(chosen[rows])), states


def _at_places(
    indices: torch.Tensor,
    log_probs: torch.Tensor,
    rest: torch.Tensor,
    places: torch.Tensor,
    top_k: int | None,
) -> TopK:
    """Pick positions, and the first k tokens, out of what a cache read; on the places' device."""
    rows = places.to(indices.device)
    tokens = indices.flatten(0, 1)[rows].to(places.device, torch.long)
    kept = torch.cat([log_probs, rest[..., None]], dim=-1).flatten(0, 1)[rows]
    # Rounded to float16 they do not add up to 1 exactly.
    kept = kept.to(places.device, torch.float32).log_softmax(-1)
    k = tokens.shape[-1] if top_k is None else top_k
    return TopK(tokens[:, :k], kept[:, :k], kept[:, k:].exp().sum(-1))


def _check_teacher(
    teacher: Teacher | TeacherCache | None, settings: LossSettings, vocabulary: int
) -> None:
    if teacher is None:
        if settings.needs_teacher:
            raise UsageError(
                "this loss needs a teacher", at="uptrain.loss", remedy="next_token: 1, distill: 0"
            )
        return
    if teacher.vocabulary != vocabulary:
        raise UsageError(
            f"the teacher predicts {teacher.vocabulary} tokens, the student {vocabulary}",
            at="source.model",
            remedy="a source with the student's tokenizer, or uptrain.loss.distill: 0",
        )
    if not isinstance(teacher, TeacherCache):
        return
    if settings.hidden or settings.attention:
        raise UsageError(
            "a teacher's cache holds no hidden states",
            at="uptrain.teacher.cache",
            remedy="uptrain.loss.hidden: 0 and attention: 0, or no cache",
        )
    if settings.temperature != teacher.temperature:
        raise UsageError(
            f"the teacher's cache was made at temperature {teacher.temperature:g}, the loss wants"
            f" {settings.temperature:g}",
            at="uptrain.loss.temperature",
            remedy="that of the cache, or a new cache",
        )
    if settings.top_k is not None and settings.top_k > teacher.top_k:
        raise UsageError(
            f"the teacher's cache holds {teacher.top_k} tokens a position, the loss wants"
            f" {settings.top_k}",
            at="uptrain.loss.top_k",
            remedy=f"at most {teacher.top_k}, or a new cache",
        )


def _check_documents(split: SplitModel) -> None:
    training = split.model.training
    split.model.eval()
    try:
        split.check_documents_apart()
    finally:
        split.model.train(training)
