"""The stages that measure: evaluate, bench, sweep, and the report of it all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gqaconvert.calibration.by_recipe import calibrates
from gqaconvert.evaluation.bench import run_bench
from gqaconvert.evaluation.bench_results import BenchSettings
from gqaconvert.evaluation.cache_kinds import cache_kind
from gqaconvert.evaluation.evaluate import Event, evaluate
from gqaconvert.evaluation.suite import Suite, changed_suite
from gqaconvert.evaluation.sweep import run_sweep
from gqaconvert.evaluation.sweep_results import SweepSettings
from gqaconvert.kv_cache.model_config import read_config
from gqaconvert.modelling.models import find_model, load_model
from gqaconvert.pipeline.experiment import Experiment
from gqaconvert.pipeline.folder import ExperimentFolder
from gqaconvert.pipeline.making import note_model
from gqaconvert.pipeline.stage import Finished
from gqaconvert.reporting.cards import write_cards
from gqaconvert.reporting.numbers import finite_figure
from gqaconvert.reporting.report import report
from gqaconvert.settings.recipe import BenchSettings as BenchSection
from gqaconvert.settings.recipe import EvaluateSettings, Recipe
from gqaconvert.surgery.options import CALIBRATED

_DEFAULT_CONTEXT = 4096


def measure_start(experiment: Experiment, _anew: bool) -> Finished:
    """Measure the source and, beside it, what is trained or would be."""
    start = experiment.start
    if start == experiment.source.folder:
        return _measure(experiment, start)
    name = find_model(start).name
    if start != experiment.folder.converted:
        note_model(experiment, "converted", start)
    return replace(_measure(experiment, start), roles={"converted": name})


def measure_trained(experiment: Experiment, _anew: bool) -> Finished:
    """Measure the trained model; the source's figures are there from before."""
    return _measure(experiment, experiment.folder.export)


def _measure(experiment: Experiment, model: Path) -> Finished:
    section = experiment.recipe.evaluate or EvaluateSettings()

    def tell(event: Event) -> None:
        if event.outcome == "measured" and event.measurement is not None:
            found = event.measurement
            value = finite_figure(found.value, found.stderr)
            experiment.tell(f"{event.model}: {event.metric} {value} {found.unit}".rstrip())
        elif event.outcome == "unavailable":
            experiment.tell(f"{event.model}: {event.metric}: not measured: {event.reason}")

    measured = evaluate(
        [model],
        baseline=experiment.source.folder,
        suite=suite_of(section),
        dtype=section.dtype,
        device=experiment.device,
        results=experiment.folder.results,
        on_event=tell,
    )
    reasons = [
        f"{metric} of {each.name} was not measured: {reason}"
        for each in measured.models
        for metric, reason in each.unavailable.items()
    ]
    note = "; ".join(
        f"{each.name}: perplexity {each.measurements['perplexity'].value:,.4g}"
        for each in measured.models
        if "perplexity" in each.measurements
    )
    return Finished("; ".join([note, *reasons]) if note else "; ".join(reasons))


def suite_of(section: EvaluateSettings) -> Suite:
    """What a recipe has measured."""
    return changed_suite(section.suite, section.changes())


def time_models(experiment: Experiment, _anew: bool) -> Finished:
    """Time the source beside the final model."""
    section = experiment.recipe.bench or BenchSection()
    models = list(dict.fromkeys((experiment.source.folder, experiment.final)))
    settings = BenchSettings(
        contexts=section.contexts or _contexts(models[0], section.new_tokens),
        batches=section.batches,
        new_tokens=section.new_tokens,
        repeats=section.repeats,
    )
    dtype = (experiment.recipe.evaluate or EvaluateSettings()).dtype
    loaded = [
        load_model(each, dtype=dtype, device=experiment.device, attn=section.attn)
        for each in models
    ]
    bench = run_bench(
        loaded,
        [cache_kind("dynamic")],
        settings,
        out=experiment.folder.bench,
        progress=lambda what: experiment.tell(f"timed {what}"),
    )
    longest = [row for row in bench.rows if row.context == max(settings.contexts) and row.decode]
    note = ", ".join(
        f"{row.label} {row.tokens_per_s:,.1f} tokens/s" for row in longest if row.tokens_per_s
    )
    return Finished(f"at {max(settings.contexts):,} tokens: {note}" if note else "nothing timed")


def _contexts(model: Path, new_tokens: int) -> tuple[int, ...]:
    longest = (read_config(model).max_position_embeddings or _DEFAULT_CONTEXT) - new_tokens
    return tuple(sorted({max(1, longest // share) for share in (16, 4, 1)}))


def compare_conversions(experiment: Experiment, _anew: bool) -> Finished:
    """Convert to other numbers of heads by other methods, and measure each."""
    recipe = experiment.recipe
    wanted, section = recipe.sweep, recipe.evaluate or EvaluateSettings()
    if wanted is None:
        return Finished("the recipe has no section sweep", needed=False)
    suite = suite_of(section)
    settings = SweepSettings(
        kv_heads=wanted.kv_heads,
        methods=sweep_methods(recipe),
        calibration=sweep_calibration(recipe, experiment.folder),
        text=suite.text,
        context=suite.context,
        windows=wanted.windows,
        spread=suite.spread,
        dtype=section.dtype,
        device=experiment.device,
    )
    sweep = run_sweep(
        experiment.source.folder, settings, experiment.folder.sweep, progress=experiment.tell
    )
    return Finished(f"{len(sweep.points)} points")


def sweep_methods(recipe: Recipe) -> tuple[str, ...]:
    """The methods of the sweep: those asked for, or what the recipe has the means for."""
    asked = recipe.sweep.methods if recipe.sweep else ()
    return asked or (("mean",) if recipe.convert.calibration is None else ("mean", "svd"))


def sweep_calibration(recipe: Recipe, folder: ExperimentFolder) -> str | None:
    """Statistics for the sweep's calibrated methods; None where it has none."""
    if not set(sweep_methods(recipe)) & set(CALIBRATED):
        return None
    return str(folder.statistics) if calibrates(recipe.convert) else recipe.convert.calibration


def write_report(experiment: Experiment, _anew: bool) -> Finished:
    """Make the report of what is in the folder, and the cards of the models."""
    folder = experiment.folder
    done = report([folder.path], folder.report)
    cards = write_cards(folder.path)
    for warning in done.warnings:
        experiment.tell(f"note: {warning}")
    note = f"{folder.report / 'report.html'}"
    return Finished(note + (f", {len(cards)} model cards" if cards else ""))
