"""A recipe: one experiment from source to report, as YAML.

    version: 1
    source: {model: llama2-7b, pretraining_tokens: 2.0e12}
    convert: {kv_heads: 8}
    uptrain: {...}                       # see `uptrain.py`
    evaluate: {suite: quick}

It holds no Python paths and inherits from nothing: what is written is what runs.
"""

from __future__ import annotations

from typing import Literal

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
    """What is measured before and after.

    Attributes:
        suite: `quick`, `standard` or a YAML file.
    """

    suite: str = "quick"


class ReportSettings(Settings):
    """What the report holds.

    Attributes:
        title: its heading; the recipe's name by default.
    """

    title: str | None = None


class Recipe(Settings):
    """One experiment.

    Attributes:
        version: of this form.
        name: of the experiment: names the run folder `runs/NAME`; the file's name by default.
        source: the model to start from.
        convert: how its KV heads become fewer.
        uptrain: how the result is trained; None for not at all.
        evaluate: what is measured.
        report: what the report holds.
    """

    version: Literal[1] = Field(examples=[1])
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    source: SourceSettings = Field(examples=[{"model": "tiny"}])
    convert: ConvertSettings = Field(examples=[{"kv_heads": 2}])
    uptrain: UptrainSettings | None = None
    evaluate: EvaluateSettings | None = None
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
