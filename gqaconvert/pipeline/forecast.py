"""What an experiment will take: time, disk and memory by stage, before anything is done.

Times are reckoned from operations and bytes, and are right within a factor of about three: they
tell minutes from hours.
"""

from __future__ import annotations

from dataclasses import dataclass

from gqaconvert.attention.estimation import read_model_config
from gqaconvert.calibration.by_recipe import calibrates
from gqaconvert.checkpoint.sources import resolve_source
from gqaconvert.evaluation.suite import Suite
from gqaconvert.kv_cache.sizes import kv_bytes_per_token
from gqaconvert.pipeline.measuring import suite_of, sweep_methods
from gqaconvert.pipeline.speed import Speed
from gqaconvert.pipeline.stage import StageName
from gqaconvert.settings.recipe import BenchSettings, EvaluateSettings, Recipe
from gqaconvert.training.flops import forward_flops
from gqaconvert.training.memory import Devices
from gqaconvert.training.model_facts import ModelFacts, model_facts
from gqaconvert.training.resources import estimate_resources
from gqaconvert.units import weight_type

_REACHED = 0.35
"""Share of a large product's speed that training and reading text come to."""

_DOUBLE = 0.25
"""Speed of products in float64, which statistics and svd use, over that in bf16, on CPUs."""

_DISK_BYTES_PER_S = 5e8
_STEP_S_PER_LAYER = 3e-4
"""A decoding step has this a layer on top of what it reads: calls, not arithmetic."""

_TASK_TOKENS = 400
"""Of an example of a task, all its answers together."""

_FIT_TOKENS = 4 * 512
"""Of a step of the local fit."""

_BEFORE_FIRST_S = 8.0
"""Importing libraries."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a stage will take.

    Attributes:
        seconds: roughly; None where it cannot be told.
        disk_bytes: it leaves behind, and needs on the way.
        memory_bytes: at most, of one device.
    """

    seconds: float | None
    disk_bytes: int
    memory_bytes: int


def forecast(
    recipe: Recipe, speed: Speed | None, devices: Devices, device_bytes: int | None
) -> dict[StageName, Forecast] | None:
    """Forecast every stage of a recipe; None where its class cannot be reckoned with.

    Only config.json is read.

    Args:
        recipe: what is done.
        speed: of one device; None where unknown, and then there are no times.
        devices: of the uptraining.
        device_bytes: memory of one; None where unknown.

    Raises:
        UsageError: no such model or suite.
    """
    config = read_model_config(recipe.source.model, recipe.source.revision)
    source, student = model_facts(config), model_facts(config, recipe.convert.kv_heads)
    if source is None or student is None:
        return None
    element = weight_type(config.dtype or "float32").size_bytes
    work = _Work(recipe, source, student, element, speed)
    kv_bytes = kv_bytes_per_token(config, element)
    rows: dict[StageName, Forecast] = {
        "source": work.source(is_far=resolve_source(recipe.source.model).kind == "hub"),
        "calibrate": work.calibration(),
        "convert": work.conversion(),
        "verify": work.verification(),
        "evaluate": work.evaluation(2, kv_bytes),
        "evaluate-uptrained": work.evaluation(1, kv_bytes),
        "bench": work.bench(kv_bytes, config.max_position_embeddings or 4096),
        "sweep": work.sweep(),
        "report": Forecast(6.0, 5_000_000, 300_000_000),
    }
    if recipe.uptrain is not None:
        resources = estimate_resources(recipe, devices, device_bytes)
        if resources is not None:
            disk = resources.disk
            flops = resources.flops.hardware * resources.tokens / devices.num_processes
            rows["uptrain"] = Forecast(
                work.seconds(flops=flops, bytes_moved=disk.total),
                disk.total - disk.converted,
                resources.memory.total,
            )
    return rows


@dataclass(frozen=True)
class _Work:
    recipe: Recipe
    before: ModelFacts
    after: ModelFacts
    element: int
    speed: Speed | None

    def seconds(self, *, flops: float = 0, doubles: float = 0, bytes_moved: float = 0,
                more: float = 0) -> float | None:  # fmt: skip
        if self.speed is None:
            return None
        reckoned = flops / (_REACHED * self.speed.flops) + doubles / (_DOUBLE * self.speed.flops)
        return reckoned + bytes_moved / _DISK_BYTES_PER_S + more

    @property
    def size_bytes(self) -> int:
        return self.element * self.before.parameters

    def source(self, *, is_far: bool) -> Forecast:
        return Forecast(
            None if is_far else self.seconds(bytes_moved=self.size_bytes, more=_BEFORE_FIRST_S),
            self.size_bytes if is_far else 0,
            300_000_000,
        )

    def calibration(self) -> Forecast:
        wanted = self.recipe.convert
        if not calibrates(wanted):
            return Forecast(0.0, 0, 0)
        width, layers = self.before.hidden_size, self.before.num_layers
        # Three moments of M × M in float32 a layer: of inputs, and of what attention reads of them.
        size = 3 * 4 * width * width * layers
        tokens = wanted.calibration_tokens
        return Forecast(
            self.seconds(
                flops=tokens * forward_flops(self.before, 512),
                doubles=3 * 2 * tokens * width * width * layers,
                bytes_moved=size,
            ),
            size,
            self.size_bytes // max(1, layers) * 4 + size // max(1, layers) * 4,
        )

    def conversion(self) -> Forecast:
        wanted, facts = self.recipe.convert, self.before
        written = self.element * self.after.parameters
        doubles = fit = 0.0
        if wanted.method in ("svd", "procrustes"):
            rows = facts.head_dim * (facts.num_heads + facts.num_kv_heads)
            doubles = 8.0 * facts.hidden_size**2 * rows * facts.num_layers
        if wanted.fit_steps:
            attention = 2.0 * facts.attention * 3
            fit = attention * wanted.fit_steps * _FIT_TOKENS
        if wanted.distill_steps:
            fit += 4.0 * forward_flops(facts, 512) * 1024 * wanted.distill_steps
        return Forecast(
            self.seconds(flops=fit, doubles=doubles, bytes_moved=written), written, 400_000_000
        )

    def verification(self) -> Forecast:
        size = self.element * self.after.parameters
        return Forecast(self.seconds(bytes_moved=2 * size, more=2.0), 0, size)

    def evaluation(self, models: int, kv_bytes: int) -> Forecast:
        section = self.recipe.evaluate
        suite = suite_of(section or EvaluateSettings())
        read = _read_tokens(suite)
        forward = forward_flops(self.before, suite.context)
        steps = len(suite.cache) * suite.cache_windows * suite.cache_decode
        memory = 2 * self.size_bytes + suite.context * (4 * 3 * self.before.vocab_size + kv_bytes)
        # Divergence reads the source once more, beside each other model.
        flops = forward * read * (2 * models - 1 if models > 1 else 2)
        return Forecast(
            self.seconds(flops=flops, more=models * steps * self._step_s()), 2_000_000, memory
        )

    def bench(self, kv_bytes: int, longest: int) -> Forecast:
        section = self.recipe.bench or BenchSettings()
        contexts = section.contexts or (longest // 16, longest // 4, longest)
        tokens = sum(contexts) * sum(section.batches)
        repeats = section.repeats + 1
        steps = 2 * repeats * section.new_tokens * len(contexts) * len(section.batches)
        cache = kv_bytes * max(contexts) * max(section.batches)
        moved = cache * steps / self.speed.bytes_per_s if self.speed else 0.0
        prefill = 2 * repeats * tokens * forward_flops(self.before, max(contexts))
        return Forecast(
            self.seconds(flops=prefill, more=steps * self._step_s() + moved + 2.0),
            100_000,
            2 * self.size_bytes + 2 * cache,
        )

    def sweep(self) -> Forecast:
        wanted, section = self.recipe.sweep, self.recipe.evaluate
        if wanted is None:
            return Forecast(0.0, 0, 0)
        suite = suite_of(section or EvaluateSettings())
        heads = self.before.num_kv_heads
        counts = len(wanted.kv_heads) or sum(heads % n == 0 for n in range(1, heads))
        points = 1 + counts * len(sweep_methods(self.recipe))
        reading = 2 * points * wanted.windows * suite.context
        return Forecast(
            self.seconds(
                flops=reading * forward_flops(self.before, suite.context),
                bytes_moved=2.0 * points * self.size_bytes,
            ),
            self.size_bytes,
            2 * self.size_bytes,
        )

    def _step_s(self) -> float:
        """A step of decoding with a short cache."""
        if self.speed is None:
            return 0.0
        return self.size_bytes / self.speed.bytes_per_s + _STEP_S_PER_LAYER * self.before.num_layers


def _read_tokens(suite: Suite) -> int:
    windows = suite.windows or 100
    tasks = len(suite.tasks) * (suite.task_limit or 500) * _TASK_TOKENS
    return windows * suite.context + tasks
