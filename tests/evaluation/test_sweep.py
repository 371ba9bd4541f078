"""`sweep`: the trade-off curve, and going on where it stopped."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch

from gqaconvert.errors import CheckpointError, UsageError
from gqaconvert.evaluation import sweep_conversions
from gqaconvert.evaluation.sweep import run_sweep
from gqaconvert.evaluation.sweep_measures import SweepMeasures
from gqaconvert.evaluation.sweep_results import SweepSettings

SETTINGS = SweepSettings(
    kv_heads=(4, 1), context=64, windows=2, caches=("sliding:16", "offloaded"), cache_windows=1,
    dtype="float32",
)  # fmt: skip


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    out = tmp_path_factory.mktemp("sweep")
    return run_sweep("tiny", SETTINGS, out), out


@pytest.fixture
def again(done, tmp_path):
    """A folder with the results of a finished sweep."""
    shutil.copytree(done[1], tmp_path / "again")
    return tmp_path / "again"


class TestPoints:
    def test_there_is_one_for_everything_asked_for(self, done):
        points = done[0].points
        assert [(point.kind, point.kv_heads, point.cache_kind) for point in points] == [
            ("source", 8, "dynamic"),
            ("cache", 8, "dynamic"),
            ("cache", 8, "sliding:16"),
            ("cache", 8, "offloaded"),
            ("conversion", 4, "dynamic"),
            ("conversion", 1, "dynamic"),
        ]

    def test_the_source_keeps_all_and_conversions_less(self, done):
        points = done[0].points
        assert points[0].quality == points[1].quality == 1
        source, four, one = points[0], points[4], points[5]
        assert 0 < one.quality < four.quality < 0.9
        assert four.quality == pytest.approx(source.perplexity / four.perplexity)
        assert one.kl > four.kl > 0.1
        assert one.top1 < four.top1 < 1

    def test_bytes_are_those_of_the_cache(self, done):
        points = done[0].points
        # heads × 2 × layers × head_dim × bytes × tokens
        assert points[0].kv_bytes == 8 * 2 * 4 * 32 * 4 * 63
        assert points[2].kv_bytes < points[0].kv_bytes / 3
        assert points[5].kv_bytes == points[0].kv_bytes // 8
        assert points[0].kv_bytes == points[1].kv_bytes == 2 * points[4].kv_bytes
        assert all(p.kv_tokens == 63 for p in points if p.kv_bytes)

    def test_cache_kinds_are_held_to_the_ordinary_cache(self, done):
        points = done[0].points
        assert points[2].quality == pytest.approx(points[1].perplexity / points[2].perplexity)
        assert "CUDA" in (points[3].unavailable or "CUDA")

    def test_gradients_can_be_taken_afterwards(self, done):
        assert done
        assert not torch.is_inference_mode_enabled()

    def test_conversions_are_removed_unless_kept(self, done):
        assert list((done[1] / "models").iterdir()) == []


class TestGoingOn:
    def test_finished_points_are_not_measured_again(self, done, again, monkeypatch):
        def never(*_: object) -> None:
            raise AssertionError("measured or converted again")

        for name in ("load", "source_point", "conversion", "through"):
            monkeypatch.setattr(SweepMeasures, name, never)
        assert run_sweep("tiny", SETTINGS, again).points == done[0].points

    def test_only_what_is_new_is_measured(self, done, again, monkeypatch):
        measured = []
        conversion = SweepMeasures.conversion

        def watched(self, key, load, method, reference):
            measured.append(method)
            return conversion(self, key, load, method, reference)

        monkeypatch.setattr(SweepMeasures, "conversion", watched)
        more = replace(SETTINGS, methods=("mean", "first"), kv_heads=(4,))
        points = run_sweep("tiny", more, again).points
        assert measured == ["first"]
        assert points[4] == done[0].points[4]
        assert points[5].quality == pytest.approx(points[0].perplexity / points[5].perplexity)

    def test_other_windows_are_measured_anew(self, done, again):
        fewer = replace(SETTINGS, windows=1, kv_heads=(4,), caches=())
        points = run_sweep("tiny", fewer, again).points
        assert points[0].perplexity != done[0].points[0].perplexity

    def test_a_stopped_sweep_keeps_what_it_had(self, tmp_path, monkeypatch):
        def stop(*_: object) -> None:
            raise KeyboardInterrupt

        short = replace(SETTINGS, caches=())
        with monkeypatch.context() as patched:
            patched.setattr(SweepMeasures, "conversion", stop)
            with pytest.raises(KeyboardInterrupt):
                run_sweep("tiny", short, tmp_path)
        content = json.loads((tmp_path / "sweep.json").read_text())
        assert [point["kind"] for point in content["points"]] == ["source"]

    def test_a_converted_folder_of_the_same_plan_is_used_again(self, tmp_path, monkeypatch):
        kept = replace(SETTINGS, caches=(), kv_heads=(4,), keep=True)
        run_sweep("tiny", kept, tmp_path)
        folder = tmp_path / "models" / "tiny-kv4-mean"
        assert (folder / "model.safetensors").is_file()
        converted = []
        convert = sweep_conversions.convert

        def watched(*args, **options):
            if not options["dry_run"]:
                converted.append(options["method"])
            return convert(*args, **options)

        monkeypatch.setattr(sweep_conversions, "convert", watched)
        (tmp_path / "sweep.json").unlink()
        run_sweep("tiny", kept, tmp_path)
        assert converted == []
        manifest = folder / "gqaconvert.json"
        manifest.write_text(manifest.read_text().replace('"sha256": "', '"sha256": "0', 1))
        content = json.loads(manifest.read_text())
        content["plan"]["sha256"] = "of another plan"
        manifest.write_text(json.dumps(content))
        (tmp_path / "sweep.json").unlink()
        run_sweep("tiny", kept, tmp_path)
        assert converted == ["mean"]

    def test_a_damaged_file_is_named(self, tmp_path):
        (tmp_path / "sweep.json").write_text('{"points": [{}]}')
        with pytest.raises(CheckpointError, match="not the results of a sweep"):
            run_sweep("tiny", SETTINGS, tmp_path)


class TestMistakes:
    def test_an_impossible_count_is_refused_before_anything_is_measured(self, tmp_path):
        with pytest.raises(UsageError, match="cannot be pooled into 3"):
            run_sweep("tiny", replace(SETTINGS, kv_heads=(4, 3)), tmp_path / "out")
        assert not (tmp_path / "out" / "sweep.json").exists()

    def test_unknown_methods_and_kinds_are_refused(self):
        with pytest.raises(UsageError, match="unknown method"):
            SweepSettings(methods=("median",))
        with pytest.raises(UsageError, match="cache kind"):
            SweepSettings(caches=("quantized",))
