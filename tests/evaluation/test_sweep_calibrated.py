"""`sweep` with methods that need statistics of a text: gathered once, and part of what is known."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from gqaconvert.calibration.calibrate import calibrate
from gqaconvert.errors import RefusedError, UsageError
from gqaconvert.evaluation import sweep_conversions
from gqaconvert.evaluation.sweep import run_sweep
from gqaconvert.evaluation.sweep_conversions import STATISTICS
from gqaconvert.evaluation.sweep_measures import SweepMeasures
from gqaconvert.evaluation.sweep_results import SweepSettings

SETTINGS = SweepSettings(
    kv_heads=(4, 2), context=64, windows=2, dtype="float32", calibration="bundled",
    calibration_tokens=2048,
)  # fmt: skip
FITTED = replace(SETTINGS, kv_heads=(2,), methods=("svd",), fit_steps=4, fit_windows=8, keep=True)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    out = tmp_path_factory.mktemp("sweep")
    return run_sweep("tiny", SETTINGS, out), out


@pytest.fixture
def again(done, tmp_path):
    """A folder with the results of a finished sweep."""
    shutil.copytree(done[1], tmp_path / "again")
    return tmp_path / "again"


@pytest.fixture
def measured(monkeypatch):
    """Methods of the conversions that are measured, not taken over."""
    methods: list[str | None] = []
    conversion = SweepMeasures.conversion

    def watched(self, key, load, method, reference):
        methods.append(method)
        return conversion(self, key, load, method, reference)

    monkeypatch.setattr(SweepMeasures, "conversion", watched)
    return methods


def no_calibration(monkeypatch):
    def never(*_: object, **__: object) -> None:
        raise AssertionError("statistics gathered again")

    monkeypatch.setattr(sweep_conversions, "calibrate", never)


class TestPoints:
    def test_the_mean_and_svd_are_measured_by_default(self, done):
        points = done[0].points
        assert [(point.kv_heads, point.method) for point in points] == [
            (8, None), (4, "mean"), (4, "svd"), (2, "mean"), (2, "svd"),
        ]  # fmt: skip
        assert SweepSettings().chosen_methods == ("mean",)

    def test_statistics_make_conversions_better(self, done):
        quality = {(point.kv_heads, point.method): point.quality for point in done[0].points}
        assert quality[4, "svd"] > 2 * quality[4, "mean"]
        assert quality[2, "svd"] > 2 * quality[2, "mean"]

    def test_what_was_read_is_recorded_and_kept(self, done):
        sweep, out = done
        assert sweep.settings["calibration"] == {
            "texts": ["bundled:train"], "tokens": 2048, "grouping": "adjacent",
        }  # fmt: skip
        assert sorted(path.name for path in out.iterdir()) == [STATISTICS, "models", "sweep.json"]

    def test_procrustes_needs_no_statistics_and_grouping_is_for_calibrated_methods(self, tmp_path):
        settings = replace(
            SETTINGS, kv_heads=(2,), methods=("mean", "procrustes"), calibration=None,
            grouping="similarity",
        )  # fmt: skip
        points = run_sweep("tiny", settings, tmp_path).points
        assert points[2].quality > points[1].quality
        adjacent = run_sweep("tiny", replace(settings, grouping="adjacent"), tmp_path).points
        assert adjacent[1] == points[1]
        assert adjacent[2].perplexity != points[2].perplexity
        assert not (tmp_path / STATISTICS).exists()


class TestGoingOn:
    def test_statistics_are_gathered_once_and_points_taken_over(
        self, done, again, measured, monkeypatch
    ):
        no_calibration(monkeypatch)
        assert run_sweep("tiny", SETTINGS, again).points == done[0].points
        assert measured == []

    def test_other_statistics_are_another_svd_but_the_same_mean(
        self, done, again, measured, tmp_path, monkeypatch
    ):
        calibrate("tiny", "bundled", out=tmp_path / "more.safetensors", tokens=4096)
        no_calibration(monkeypatch)
        other = replace(SETTINGS, calibration=str(tmp_path / "more.safetensors"))
        points = run_sweep("tiny", other, again).points
        assert measured == ["svd", "svd"]
        assert points[1] == done[0].points[1]
        assert points[2].perplexity != done[0].points[2].perplexity

    def test_statistics_of_something_else_are_not_used(self, again):
        with pytest.raises(RefusedError, match="of another model or text"):
            run_sweep("tiny", replace(SETTINGS, calibration_tokens=1024), again)

    def test_a_fit_is_a_point_of_its_own(self, again, measured, monkeypatch):
        no_calibration(monkeypatch)
        said = []
        fitted = run_sweep("tiny", FITTED, again, progress=said.append)
        assert [point.method for point in fitted.points] == [None, "svd + fit"]
        assert fitted.settings["calibration"]["fit_steps"] == 4
        assert measured == ["svd + fit"]
        assert sum("error" in line for line in said) == 4  # layers
        folder = again / "models" / "tiny-kv2-svd-fit"
        assert "fit" in (folder / "gqaconvert.json").read_text()
        # What was planned before is what the folder says, so that it is found again.
        (again / "sweep.json").unlink()
        written = (folder / "model.safetensors").stat().st_mtime_ns
        repeated = run_sweep("tiny", FITTED, again)
        assert repeated.points[1] == fitted.points[1]
        assert (folder / "model.safetensors").stat().st_mtime_ns == written
        run_sweep("tiny", replace(FITTED, fit_steps=2), again)
        assert measured == ["svd + fit"] * 3


class TestMistakes:
    def test_counts_are_checked_before_statistics_are_gathered(self, tmp_path, monkeypatch):
        no_calibration(monkeypatch)
        with pytest.raises(UsageError, match="cannot be pooled into 3"):
            run_sweep("tiny", replace(SETTINGS, kv_heads=(3,)), tmp_path)

    @pytest.mark.parametrize(
        ("options", "fault"),
        [
            ({"methods": ("svd",)}, "svd needs a calibration"),
            ({"methods": ("mean",), "calibration": "bundled"}, "no method that --calibration"),
            ({"fit_steps": 4}, "no method that --fit-steps"),
            ({"grouping": "similarity"}, "no method that --grouping"),
            ({"methods": ("procrustes",), "grouping": "nearest"}, "unknown grouping"),
            ({"calibration": "known.safetensors", "fit_steps": 4}, "reads text, and none is"),
        ],
    )
    def test_options_that_do_nothing_are_refused(self, options, fault):
        with pytest.raises(UsageError, match=fault):
            SweepSettings(**options)

    def test_calibrating_on_what_is_measured_is_said(self, tmp_path):
        text = tmp_path / "text.txt"
        text.write_text("".join(f"def f{n}(x):\n    return x + {n}\n" for n in range(300)))
        said: list[str] = []
        settings = replace(SETTINGS, kv_heads=(4,), text=str(text), calibration=str(text))
        run_sweep("tiny", settings, tmp_path / "out", progress=said.append)
        assert any("measured on and calibrated on" in line for line in said)
        assert not any("error" in line for line in said)
