"""The section `uptrain` of a recipe: data, loss, what trains, optimiser, budget, safety.

Counts of tokens are over all devices together. One step updates the weights once.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from gqaconvert.settings.along_the_way import CheckpointSettings, HeldOutSettings
from gqaconvert.settings.base import KEEP, OutputDtype, Settings, all_of

Share = Annotated[float, Field(ge=0, lt=1)]


class DatasetSettings(Settings):
    """One source of text in a mixture.

    Attributes:
        path: "bundled", a local .txt, .md, .jsonl or .parquet file, a folder or glob of them, or
            "dataset:NAME[:CONFIG[:SPLIT]]" of `datasets`.
        weight: share of documents drawn from it, relative to the others.
        field: key of the text in a row.
        messages: key of a chat in a row; then `field` is not read.
        loss_on: which tokens of a chat count: all, or only the assistant's replies.
        streaming: read a Hub data set as it comes, without downloading it whole.
    """

    path: str = Field(min_length=1, examples=["bundled"])
    weight: float = Field(default=1.0, gt=0)
    field: str = "text"
    messages: str | None = None
    loss_on: Literal["all", "replies"] = "all"
    streaming: bool = False

    @model_validator(mode="after")
    def _replies_are_of_chats(self) -> DatasetSettings:
        if self.loss_on == "replies" and self.messages is None:
            raise ValueError("loss_on: replies needs messages, the key of the chat in a row")
        return self


class DataSettings(Settings):
    """What is read and how it is packed.

    Attributes:
        datasets: the mixture.
        context: tokens a sequence.
        separate_documents: keep the documents packed into one sequence from attending to each
            other.
        shuffle_buffer: documents held to draw the next from at random; 1 keeps their order.
        workers: threads that tokenise ahead on each device; 0 for none.
        seed: of order and mixture.
    """

    datasets: tuple[DatasetSettings, ...] = Field(min_length=1, examples=[[{"path": "bundled"}]])
    context: int = Field(default=1024, ge=2)
    separate_documents: bool = False
    shuffle_buffer: int = Field(default=1024, ge=1)
    workers: int = Field(default=1, ge=0)
    seed: int = 0


class TeacherSettings(Settings):
    """The source model as the teacher of a distillation.

    Attributes:
        dtype: in which its frozen weights are held.
        cache: folder of its top-k log-probabilities, made once and then read instead of running
            the teacher; None to run it in the same process.
        cache_top_k: how many are kept for each token.
    """

    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    cache: str | None = None
    cache_top_k: int = Field(default=64, ge=1)


class LossSettings(Settings):
    """What is minimised: a weighted sum; a weight of 0 leaves a part out.

    Attributes:
        next_token: weight of the cross entropy of the next token.
        distill: weight of the forward KL divergence from the source.
        temperature: at which both are compared; the KL is multiplied by its square.
        top_k: compare only the source's k likeliest tokens and the rest as one; None for all.
        distill_decay: end with this share of `distill`, falling linearly over the budget.
        hidden: weight of the mean squared error between hidden states after each layer, relative
            to the source's mean square.
        attention: the same between the outputs of attention blocks.
        chunk_tokens: positions whose logits exist at one time; None to choose by device.
    """

    next_token: float = Field(default=0.0, ge=0)
    distill: float = Field(default=1.0, ge=0)
    temperature: float = Field(default=1.0, gt=0)
    top_k: int | None = Field(default=None, ge=1)
    distill_decay: float = Field(default=1.0, ge=0, le=1)
    hidden: float = Field(default=0.0, ge=0)
    attention: float = Field(default=0.0, ge=0)
    chunk_tokens: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _something_to_minimise(self) -> LossSettings:
        if not (self.next_token or self.distill or self.hidden or self.attention):
            raise ValueError("all weights are 0")
        return self

    @property
    def needs_teacher(self) -> bool:
        """Whether the source has to be run or read."""
        return bool(self.distill or self.hidden or self.attention)


class StageSettings(Settings):
    """A part of the budget in which only some weights train.

    Attributes:
        share: of the budget; those of all stages add up to 1.
        train: "all", "attention" (q, k, v, o and their norms), or "kv" (k and v, their norms and
            the norm before them).
        lr_scale: factor on the learning rate.
    """

    share: float = Field(gt=0, le=1, examples=[1.0])
    train: Literal["all", "attention", "kv"] = "all"
    lr_scale: float = Field(default=1.0, gt=0)


class LoraSettings(Settings):
    """Low-rank adapters through peft, merged on export.

    Attributes:
        rank: of the adapters.
        alpha: their scale, over the rank.
        dropout: on their inputs.
        target: "attention" or "all" linear layers.
        train_kv: train k and v whole beside the adapters, since they changed most.
    """

    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    target: Literal["attention", "all"] = "all"
    train_kv: bool = True


class BudgetSettings(Settings):
    """How long to train: exactly one of these.

    Attributes:
        tokens: in all.
        steps: updates.
        alpha: share of the source's pretraining tokens, as in the GQA paper.
    """

    tokens: float | None = Field(default=None, gt=0)
    steps: int | None = Field(default=None, ge=1)
    alpha: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _exactly_one(self) -> BudgetSettings:
        if sum(value is not None for value in (self.tokens, self.steps, self.alpha)) != 1:
            raise ValueError("give exactly one of tokens, steps and alpha")
        return self


class ScheduleSettings(Settings):
    """The learning rate over the budget.

    Attributes:
        kind: "wsd" is warm-up, stable, decay.
        warmup: share of the budget in which it rises linearly from 0.
        decay: share of the budget in which "wsd" falls.
        floor: share of the highest rate at the end.
    """

    kind: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    warmup: float = Field(default=0.05, ge=0, lt=1)
    decay: float = Field(default=0.2, gt=0, le=1)
    floor: float = Field(default=0.0, ge=0, le=1)

    @model_validator(mode="after")
    def _fits_the_budget(self) -> ScheduleSettings:
        if self.kind == "wsd" and self.warmup + self.decay > 1:
            raise ValueError(f"warmup and decay add up to {self.warmup + self.decay:g} of 1")
        return self


class SafetySettings(Settings):
    """When a step is skipped, and when the run stops.

    Attributes:
        spike_factor: a gradient norm this many times the running median is a spike.
        spike_window: steps of which the median is taken; no step is a spike before.
        max_skipped: steps skipped in a row, for spikes or values that are not finite, after which
            the run stops with its last good state kept.
    """

    spike_factor: float = Field(default=10.0, gt=1)
    spike_window: int = Field(default=50, ge=1)
    max_skipped: int = Field(default=10, ge=0)


class UptrainSettings(Settings):
    """How a converted model is trained.

    Attributes:
        start: checkpoint to train; by default the conversion of this recipe, made when missing.
        data: what is read.
        loss: what is minimised.
        stages: what trains when; everything, all the time, by default.
        lora: train adapters instead of whole weights.
        budget: how long.
        batch_tokens: tokens a step over all devices: a multiple of `data.context`.
        micro_batch: sequences a device reads at once; gradients are accumulated up to
            `batch_tokens`.
        lr: highest learning rate.
        betas: of AdamW.
        eps: of AdamW.
        weight_decay: of AdamW, on matrices only.
        max_grad_norm: gradients are scaled down to this norm.
        schedule: the learning rate over the budget.
        precision: "bf16" computes in bfloat16 with weights and optimiser in float32; "fp32" does
            everything in float32; "pure-bf16" holds all in bfloat16.
        attention: implementation, as `--attn` of `evaluate`.
        activation_checkpointing: compute layers again in the backward pass instead of keeping
            what they computed.
        compile: torch.compile each decoder layer.
        seed: of dropout and of adapters.
        safety: when a step is skipped.
        checkpoints: when the whole state is saved.
        held_out: the loss on other text along the way; None for not at all.
        teacher: the source model in a distillation.
        trackers: of accelerate, such as "tensorboard", "trackio" or "wandb".
        export_dtype: of the trained checkpoint: "keep" for the source's.
    """

    start: str | None = None
    data: DataSettings = Field(examples=[{"datasets": [{"path": "bundled"}]}])
    loss: LossSettings = LossSettings()
    stages: tuple[StageSettings, ...] = Field(default=(StageSettings(share=1.0),), min_length=1)
    lora: LoraSettings | None = None
    budget: BudgetSettings = Field(examples=[{"steps": 100}])
    batch_tokens: int = Field(ge=2, examples=[8192])
    micro_batch: int = Field(default=1, ge=1)
    lr: float = Field(gt=0, examples=[2e-4])
    betas: tuple[Share, Share] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    schedule: ScheduleSettings = ScheduleSettings()
    precision: Literal["bf16", "fp32", "pure-bf16"] = "bf16"
    attention: Literal["sdpa", "eager", "flash_attention_2", "flex"] = "sdpa"
    activation_checkpointing: bool = False
    compile: bool = False
    seed: int = 0
    safety: SafetySettings = SafetySettings()
    checkpoints: CheckpointSettings = CheckpointSettings()
    held_out: HeldOutSettings | None = HeldOutSettings()
    teacher: TeacherSettings = TeacherSettings()
    trackers: tuple[str, ...] = ()
    export_dtype: OutputDtype = KEEP

    @model_validator(mode="after")
    def _stages_and_batch(self) -> UptrainSettings:
        faults = []
        total = sum(stage.share for stage in self.stages)
        if abs(total - 1.0) > 1e-6:
            faults.append(f"the shares of stages add up to {total:g}, not 1")
        if self.batch_tokens % self.data.context:
            faults.append(
                f"batch_tokens {self.batch_tokens} is no multiple of data.context"
                f" {self.data.context}"
            )
        if self.lora and len(self.stages) > 1:
            faults.append("lora trains the same weights all the time; leave stages out")
        elif self.lora and self.stages[0].train != "all":
            faults.append("lora.target says what trains; leave stages out")
        if self.teacher.cache and (self.loss.hidden or self.loss.attention):
            faults.append(
                "teacher.cache holds no hidden states; set loss.hidden and .attention to 0"
            )
        all_of(faults)
        return self

    @property
    def batch_sequences(self) -> int:
        """Sequences a step over all devices."""
        return self.batch_tokens // self.data.context
