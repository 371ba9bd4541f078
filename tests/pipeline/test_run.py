"""An experiment end to end on the bundled model: what is done, kept, done again and refused."""

import json
import os
import shutil
import signal
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from gqaconvert.errors import CheckpointError, RefusedError, UsageError
from gqaconvert.pipeline.experiment import Experiment
from gqaconvert.pipeline.folder import experiment_folder
from gqaconvert.pipeline.run import Bounds, Run, prospects, run
from gqaconvert.settings.recipes import load_recipe

RECIPE = """
version: 1
source: {model: tiny}
convert: {kv_heads: 2, method: svd, calibration: TEXT, calibration_tokens: 1024}
uptrain:
  data: {datasets: [{path: TEXT}], context: 64}
  loss: {distill: 1.0}
  budget: {steps: 2}
  batch_tokens: 128
  micro_batch: 2
  lr: 1.0e-4
  precision: fp32
  held_out: {text: TEXT, every_steps: 1, windows: 1}
evaluate: {suite: SUITE, text: TEXT, context: 32}
bench: {contexts: [32], new_tokens: 2, repeats: 1}
sweep: {kv_heads: [4], windows: 1, methods: [svd]}
report: {title: "A small <experiment>"}
"""
SUITE = """
windows: 1
tasks: []
cache: [dynamic, offloaded]
cache_windows: 1
cache_decode: 4
kv_contexts: [16]
"""
ALL = [
    "source", "calibrate", "convert", "verify", "evaluate", "uptrain", "evaluate-uptrained",
    "bench", "sweep", "report",
]  # fmt: skip


@pytest.fixture(scope="module")
def bench_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experiment")
    (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 200)
    (folder / "suite.yaml").write_text(SUITE)
    text = RECIPE.replace("TEXT", str(folder / "text.txt"))
    (folder / "small.yaml").write_text(text.replace("SUITE", str(folder / "suite.yaml")))
    return folder


def experiment(folder: Path, *overrides: str, out: str = "run", steps: list | None = None):
    recipe = load_recipe(folder / "small.yaml", overrides)

    def progress(total: int):
        return nullcontext((steps if steps is not None else []).append)

    return Experiment(recipe, experiment_folder(folder / out, "small"), training_progress=progress)


@pytest.fixture(scope="module")
def first_run(bench_folder) -> Run:
    return run(experiment(bench_folder), command="gqaconvert run small.yaml")


@pytest.fixture
def copy(bench_folder, first_run, tmp_path) -> Path:
    """A folder of its own with everything done, to change."""
    for name in ("text.txt", "suite.yaml", "small.yaml"):
        shutil.copy(bench_folder / name, tmp_path)
    shutil.copytree(bench_folder / "run", tmp_path / "run", dirs_exist_ok=True)
    # The recipe names its texts by path: read the originals, whose content is what counts.
    return tmp_path


def test_every_stage_is_done_in_order(first_run):
    assert list(first_run.done) == ALL
    assert not first_run.kept


def test_the_folder_holds_what_a_report_reads(first_run):
    folder = first_run.folder
    for path in (
        folder.statistics, folder.converted / "model.safetensors", folder.verification,
        folder.export / "model.safetensors", folder.heads, folder.estimate,
        folder.bench / "bench.json", folder.sweep / "sweep.json", folder.report / "report.html",
        folder.report / "report.md", folder.results / "tiny" / "perplexity.json",
        folder.results / "converted" / "divergence.json",
        folder.results / "model" / "divergence.json",
    ):  # fmt: skip
        assert path.is_file(), path
    models = json.loads(folder.models.read_text())
    assert [models[role]["kv_heads"] for role in ("source", "converted", "uptrained")] == [8, 2, 2]
    assert models["source"]["kv_bytes_per_token"] == 4 * models["uptrained"]["kv_bytes_per_token"]
    record = json.loads(folder.record.read_text())
    assert record["roles"] == {"source": "tiny", "converted": "converted", "uptrained": "model"}
    assert record["command"] == "gqaconvert run small.yaml"


def test_what_could_not_be_measured_is_told_with_its_reason(first_run):
    if torch.cuda.is_available():
        pytest.skip("an offloaded cache works on a GPU")
    note = first_run.record.stages["evaluate-uptrained"].note
    assert "cache/offloaded of model was not measured: " in note
    assert "GPU" in note or "CUDA" in note
    assert "cache/offloaded of model" in (first_run.folder.report / "report.md").read_text()


def test_the_title_of_the_recipe_heads_the_report(first_run):
    assert "A small &lt;experiment&gt;" in (first_run.folder.report / "report.html").read_text()


def test_the_same_again_does_nothing(bench_folder, first_run):
    before = {path: path.stat().st_mtime_ns for path in first_run.folder.converted.iterdir()}
    again = run(experiment(bench_folder))
    assert list(again.done) == ["source"]  # a look at it, in case it changed
    assert list(again.kept) == ALL[1:]
    assert {
        path: path.stat().st_mtime_ns for path in first_run.folder.converted.iterdir()
    } == before


def test_a_changed_measurement_repeats_what_depends_on_it(copy):
    again = run(experiment(copy, "evaluate.windows=2"))
    assert list(again.done) == ["source", "evaluate", "evaluate-uptrained", "sweep", "report"]
    result = json.loads((again.folder.results / "model" / "perplexity.json").read_text())
    assert result["settings"]["windows"] == 2


def test_a_lost_outcome_is_made_again_and_what_is_equal_is_kept(copy):
    shutil.rmtree(copy / "run" / "converted")
    again = run(experiment(copy))
    # Converted anew to the same bytes: nothing after it has to be repeated.
    assert list(again.done) == ["source", "convert"]


def test_from_repeats_a_stage_and_all_after_it(copy):
    steps: list = []
    again = run(experiment(copy, steps=steps), Bounds(first="uptrain"))
    assert list(again.done) == ["source", *ALL[ALL.index("uptrain") :]]
    assert [line["step"] for line in steps if line["kind"] == "step"] == [1, 2]


def test_until_stops_after_a_stage(bench_folder):
    done = run(experiment(bench_folder, out="until"), Bounds(last="convert"))
    assert list(done.done) == ["source", "calibrate", "convert"]
    assert not done.folder.export.exists()


def test_training_of_another_recipe_is_not_touched(copy):
    before = (copy / "run" / "model" / "model.safetensors").read_bytes()
    with pytest.raises(RefusedError, match=r"uptrain\.lr 0\.0001 → 0\.001"):
        run(experiment(copy, "uptrain.lr=1e-3"))
    with pytest.raises(RefusedError, match=r"convert\.kv_heads 2 → 4"):
        run(experiment(copy, "convert.kv_heads=4"))
    assert (copy / "run" / "model" / "model.safetensors").read_bytes() == before
    again = run(experiment(copy, "convert.kv_heads=4"), Bounds(last="uptrain"), overwrite=True)
    assert json.loads(again.folder.models.read_text())["uptrained"]["kv_heads"] == 4


def test_a_changed_pace_of_saving_does_not_train_again(copy):
    again = run(experiment(copy, "uptrain.checkpoints.every_steps=1"))
    assert "uptrain" in again.kept


def test_a_recipe_without_training_reports_the_conversion(bench_folder):
    recipe = load_recipe(bench_folder / "small.yaml")
    changed = recipe.model_copy(update={"uptrain": None, "bench": None, "sweep": None})
    folder = experiment_folder(bench_folder / "untrained", "untrained")
    done = run(Experiment(changed, folder))
    assert list(done.done) == ["source", "calibrate", "convert", "verify", "evaluate", "report"]
    assert done.record.roles == {"source": "tiny", "converted": "converted"}


def distilling(folder: Path, steps: int, stop_at: int | None = None) -> Experiment:
    recipe = load_recipe(folder / "small.yaml")
    convert = recipe.convert.model_copy(update={"distill_steps": steps, "calibration_tokens": 1024})
    only = {"convert": convert, "uptrain": None, "evaluate": None, "bench": None, "sweep": None}

    def progress(_: int):
        def report(line):
            if line["kind"] == "step" and line["step"] == stop_at:
                os.kill(os.getpid(), signal.SIGINT)

        return nullcontext(report)

    return Experiment(
        recipe.model_copy(update=only),
        experiment_folder(folder / "distilled", "distilled"),
        training_progress=progress,
    )


def test_an_interrupted_distillation_of_a_conversion_goes_on(bench_folder):
    stopped = run(distilling(bench_folder, 3, stop_at=1))
    assert stopped.interrupted
    assert not stopped.folder.converted.exists()
    finished = run(distilling(bench_folder, 3))
    assert "convert" in finished.done
    manifest = json.loads((finished.folder.converted / "gqaconvert.json").read_text())
    assert manifest["uptrain"]["steps"] == 3
    assert not list(finished.folder.path.glob(".*distill*"))


def test_an_interrupted_distillation_can_be_forgotten(bench_folder):
    shutil.rmtree(bench_folder / "distilled", ignore_errors=True)
    assert run(distilling(bench_folder, 3, stop_at=1)).interrupted
    with pytest.raises(RefusedError, match="the saved run was another one"):
        run(distilling(bench_folder, 2))
    finished = run(distilling(bench_folder, 2), overwrite=True)
    manifest = json.loads((finished.folder.converted / "gqaconvert.json").read_text())
    assert manifest["uptrain"]["steps"] == 2


def test_a_model_that_has_that_many_heads_is_not_converted(bench_folder, first_run, tmp_path):
    text = (bench_folder / "small.yaml").read_text()
    source = tmp_path / "gqa"
    shutil.copytree(first_run.folder.converted, source)
    (tmp_path / "small.yaml").write_text(text.replace("model: tiny", f"model: {source}"))
    recipe = load_recipe(
        tmp_path / "small.yaml", ["convert.calibration=null", "convert.method=mean"]
    )
    changed = recipe.model_copy(update={"uptrain": None, "bench": None, "sweep": None})
    done = run(Experiment(changed, experiment_folder(tmp_path / "run", "same")))
    assert done.record.stages["convert"].outcome == "not needed"
    assert done.record.stages["verify"].outcome == "not needed"
    assert done.record.roles == {"source": "gqa"}


def test_a_stage_that_fails_keeps_those_before_it(bench_folder):
    broken = experiment(bench_folder, "evaluate.text=nowhere.txt", out="broken")
    with pytest.raises(UsageError, match="no such text"):
        run(broken)
    record = json.loads(broken.folder.record.read_text())
    assert list(record["stages"]) == ["source", "calibrate", "convert", "verify"]
    mended = run(experiment(bench_folder, out="broken"), Bounds(last="evaluate"))
    assert list(mended.done) == ["source", "evaluate"]


def test_prospects_tell_what_would_be_done(copy):
    def states(*overrides: str) -> dict[str, str]:
        return {stage.name: state for stage, state, _ in prospects(experiment(copy, *overrides))}

    assert set(states().values()) == {"kept"}
    changed = states("bench.repeats=2")
    assert [name for name, state in changed.items() if state == "to do"] == ["bench", "report"]
    fresh = prospects(experiment(copy, out="nowhere"), Bounds(last="convert"))
    assert [state for _, state, _ in fresh] == ["to do"] * 3 + ["not asked for"] * 7
    assert not (copy / "nowhere").exists()


def test_bounds_that_make_no_sense_are_refused():
    with pytest.raises(UsageError, match="no stage 'evalute'"):
        Bounds(first="evalute")
    with pytest.raises(UsageError, match="comes before"):
        Bounds(first="bench", last="convert")


def test_a_damaged_record_is_named(copy):
    (copy / "run" / "pipeline.json").write_text('{"format": 1}')
    with pytest.raises(CheckpointError, match="not the record of an experiment"):
        run(experiment(copy))


def test_two_runs_in_a_folder_do_not_meet(copy):
    import fcntl

    with (copy / "run" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RefusedError, match="another run is at work"):
            run(experiment(copy))
