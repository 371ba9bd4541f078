"""A recipe: one experiment from source to report, as YAML.

    version: 1
    source: {model: llama2-7b, pretraining_tokens: 2.0e12}
    convert: {kv_heads: 8}
    uptrain: {...}                       # see `uptrain.py`
    evaluate: {suite: quick}

It holds no Python paths and inherits from nothing: what is written is what runs.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from gqaconvert.settings.base import KEEP, OutputDtype, Settings
from gqaconvert.settings.uptrain import UptrainSettings


class SourceSettings(Settings):
    """The model to start from.

    Attributes:
        model: folder, alias, Hub id or `tiny`.
        revision: branch, tag or commit of a Hub model.
        pretraining_tokens: tokens it was pretrained on, to which `alpha` refers.
    """

    model: str = Field(min_length=1, examples=["tiny"])
    revision: str | None = None
    pretraining_tokens: float | None = Field(default=None, gt=0)


class ConvertSettings(Settings):
    """How its KV heads become fewer; the options of `gqaconvert convert`.

    Attributes:
        kv_heads: KV heads wanted.
        method: how the heads of a group become one.
        grouping: which heads share.
        seed: for `random`.
        dtype: "keep", or the type of all floating tensors.
        calibration: statistics file or text, for methods that need it.
        calibration_tokens: of the text, when it is one.
        fit_steps: steps of the local fit a layer; 0 for none.
        distill_steps: steps of end-to-end distillation on the calibration text; 0 for none.
    """

    kv_heads: int = Field(ge=1, examples=[2])
    method: Literal["mean", "first", "random", "procrustes", "svd"] = "mean"
    grouping: Literal["adjacent", "similarity"] = "adjacent"
    seed: int = 0
    dtype: OutputDtype = KEEP
    calibration: str | None = None
    calibration_tokens: int = Field(default=131072, ge=1)
    fit_steps: int = Field(default=0, ge=0)
    distill_steps: int = Field(default=0, ge=0)


class EvaluateSettings(Settings):
    """What is measured before and after: a suite, and changes of its keys.

    Attributes:
        suite: `quick`, `standard` or a YAML file.
        text: as for `uptrain.held_out.text`; None for the suite's, as below.
        context: tokens a window.
        windows: how many.
        spread: take them evenly over the text, not the first ones.
        top_k: tokens of the source kept on disk to measure divergence; 0 for both in memory.
        tasks: of lm-eval, `continuation`, or YAML files.
        task_limit: examples of each task.
        cache: kinds of cache, such as `quantised:int4`.
        cache_windows: windows read through each.
        dtype: of the weights in memory; "auto" for that of the checkpoint.
    """

    suite: str = "quick"
    text: str | None = None
    context: int | None = Field(default=None, ge=2)
    windows: int | None = Field(default=None, ge=1)
    spread: bool | None = None
    top_k: int | None = Field(default=None, ge=0)
    tasks: tuple[str, ...] | None = None
    task_limit: int | None = Field(default=None, ge=1)
    cache: tuple[str, ...] | None = None
    cache_windows: int | None = Field(default=None, ge=1)
    dtype: str = "auto"

    def changes(self) -> dict[str, Any]:
        """Keys of the suite that the recipe sets itself."""
        content = self.model_dump(exclude={"suite", "dtype"})
        return {key: value for key, value in content.items() if value is not None}


class BenchSettings(Settings):
    """What is timed: the source beside the final model.

    Attributes:
        contexts: tokens in the cache; None for a sixteenth, a quarter and all of what the model
            was made for.
        batches: requests at a time.
        new_tokens: steps of decoding in a repeat.
        repeats: over which medians are taken.
        attn: attention implementation; "packed" reads each KV head once on CPUs too.
    """

    contexts: tuple[Annotated[int, Field(ge=1)], ...] | None = None
    batches: tuple[Annotated[int, Field(ge=1)], ...] = (1,)
    new_tokens: int = Field(default=16, ge=1)
    repeats: int = Field(default=5, ge=1)
    attn: Literal["sdpa", "eager", "packed", "flash_attention_2", "flex"] = "sdpa"


class SweepRecipeSettings(Settings):
    """Other conversions of the source, for the trade-off curve; none of them is trained.

    Attributes:
        kv_heads: counts; all legal ones by default.
        methods: of pooling; by default "mean", and "svd" where `convert` has a calibration, which
            is used.
        windows: of the evaluation's text that each is measured on.
    """

    kv_heads: tuple[Annotated[int, Field(ge=1)], ...] = ()
    methods: tuple[Literal["mean", "first", "random", "procrustes", "svd"], ...] = ()
    windows: int = Field(default=8, ge=1)


class ReportSettings(Settings):
    """What the report holds.

    Attributes:
        title: its heading; the recipe's name by default.
        gpu: whose memory requests are to fit: a name of `gqaconvert estimate --gpus`, or a size.
    """

    title: str | None = None
    gpu: str = "24GiB"


class Recipe(Settings):
    """One experiment.

    Attributes:
        version: of this form.
        name: of the experiment: names the run folder `runs/NAME`; the file's name by default.
        source: the model to start from.
        convert: how its KV heads become fewer.
        uptrain: how the result is trained; None for not at all.
        evaluate: what is measured; None for nothing.
        bench: what is timed; None for nothing.
        sweep: other conversions to compare with; None for none.
        report: what the report holds.
    """

    version: Literal[1] = Field(examples=[1])
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    source: SourceSettings = Field(examples=[{"model": "tiny"}])
    convert: ConvertSettings = Field(examples=[{"kv_heads": 2}])
    uptrain: UptrainSettings | None = None
    evaluate: EvaluateSettings | None = None
    bench: BenchSettings | None = None
    sweep: SweepRecipeSettings | None = None
    report: ReportSettings | None = None

    @model_validator(mode="after")
    def _distils_once(self) -> Recipe:
        if self.uptrain and self.convert.distill_steps:
            raise ValueError("uptrain distils; leave convert.distill_steps out")
        return self

    @model_validator(mode="after")
    def _alpha_refers_to_something(self) -> Recipe:
        budget = self.uptrain.budget if self.uptrain else None
        if budget and budget.alpha is not None and self.source.pretraining_tokens is None:
            raise ValueError("uptrain.budget.alpha needs source.pretraining_tokens")
        return self
