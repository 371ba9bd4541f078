"""`bench`: medians, turns, bounds and knees, and the one file everything is made from."""

from __future__ import annotations

import json
import statistics

import pytest
import torch

from gqaconvert.errors import UsageError
from gqaconvert.evaluation.bandwidth import Bandwidth
from gqaconvert.evaluation.bench import run_bench
from gqaconvert.evaluation.bench_bounds import knee_tokens, model_facts
from gqaconvert.evaluation.bench_results import BenchSettings
from gqaconvert.evaluation.cache_kinds import cache_kind
from gqaconvert.evaluation.latency import Decode, Prefill, TimedModel
from gqaconvert.modelling.models import load_model
from gqaconvert.surgery.in_memory import convert_model

BANDWIDTH = Bandwidth(1e9, 2e9, 1.5e9, 2**24, None, 1, "cpu")


@pytest.fixture(scope="module")
def tiny():
    return load_model("tiny")


def bench(models, kinds=("dynamic",), **settings):
    settings = {"contexts": (8, 16), "new_tokens": 1, "repeats": 1, "warmup": 0, **settings}
    out = settings.pop("out", None)
    made = [cache_kind(spec) for spec in kinds]
    return run_bench(models, made, BenchSettings(**settings), out=out, bandwidth=BANDWIDTH)


class TestRows:
    def test_bytes_are_measured_and_agree_with_the_formula(self, tiny):
        for row in bench([tiny], batches=(1, 2)).rows:
            assert row.cache_bytes == row.cache_bytes_formula == 4096 * row.context * row.batch

    def test_the_bound_is_that_of_the_ruler(self, tiny):
        found = bench([tiny], batches=(3,))
        [facts] = found.models
        assert facts.read_bytes == facts.weights_bytes == 7_377_408  # tied: the embedding is read
        for row in found.rows:
            bound = 3 * 2e9 / (facts.read_bytes + row.cache_bytes)
            assert row.bound_tokens_per_s == pytest.approx(bound)
            assert row.tokens_per_s == pytest.approx(3 / row.decode.median_s)
            assert row.share_of_bound == pytest.approx(row.tokens_per_s / bound)

    def test_medians_and_spread_are_those_of_the_repeats(self, tiny):
        for row in bench([tiny], repeats=3, contexts=(8,)).rows:
            for timing in (row.prefill, row.decode):
                assert len(timing.values_s) == 3
                assert timing.median_s == statistics.median(timing.values_s)
                assert timing.min_s == min(timing.values_s)
                assert timing.max_s == max(timing.values_s)
                assert 0 <= timing.iqr_s <= timing.max_s - timing.min_s

    def test_a_kind_that_does_not_work_says_why_and_the_others_go_on(self, tiny):
        if torch.cuda.is_available():
            pytest.skip("offloading works here")
        found = bench([tiny], ("offloaded", "dynamic"), contexts=(16,))
        offloaded, dynamic = found.rows
        assert "CUDA" in offloaded.skipped
        assert offloaded.decode is None
        assert dynamic.decode is not None

    def test_an_embedding_that_is_only_looked_up_is_not_read(self, tiny):
        loaded = load_model("tiny")
        head = torch.nn.Linear(256, 2048, bias=False, dtype=torch.bfloat16)
        loaded.model.lm_head = head
        facts = model_facts(loaded)
        assert facts.weights_bytes == 7_377_408 + 2048 * 256 * 2
        assert facts.read_bytes == 7_377_408

    def test_models_of_one_name_are_told_apart(self, tiny):
        found = bench([tiny, tiny], contexts=(8,))
        assert [row.model for row in found.rows] == ["tiny", "tiny (2)"]


class TestTurns:
    def test_models_take_turns_within_each_repeat(self, tiny, monkeypatch):
        calls = []

        def decode(self, context, batch, fill):
            calls.append(self.kind.name)
            return Decode(0.1, 1, None, "random")

        monkeypatch.setattr(TimedModel, "decode", decode)
        monkeypatch.setattr(TimedModel, "prefill", lambda self, c, b: Prefill(0.1, None))
        bench([tiny], ("dynamic", "static", "sliding:8"), contexts=(16,), repeats=3, warmup=1)
        assert len(calls) == 12
        for begin in range(0, 12, 3):
            assert set(calls[begin : begin + 3]) == {"dynamic", "static", "sliding:8"}
        assert len({tuple(calls[begin : begin + 3]) for begin in range(3, 12, 3)}) == 3

    def test_warmup_does_not_count(self, tiny, monkeypatch):
        times = iter([9.0, 9.0, 1.0, 2.0, 3.0])
        monkeypatch.setattr(
            TimedModel, "decode", lambda self, c, b, f: Decode(next(times), 1, None, "random")
        )
        [row] = bench([tiny], contexts=(16,), repeats=3, warmup=2).rows
        assert row.decode.values_s == (1.0, 2.0, 3.0)

    def test_prefills_foreseen_to_be_long_are_left_out(self, tiny, monkeypatch):
        monkeypatch.setattr(TimedModel, "prefill", lambda self, c, b: Prefill(c / 10, None))
        found = bench([tiny], contexts=(16, 32, 64), prefill_limit_s=4.0, repeats=1)
        assert [row.prefill is not None for row in found.rows] == [True, True, False]
        assert "6 s or more" in found.rows[2].no_prefill
        assert found.rows[2].decode is not None
        assert any("left out" in note for note in found.notes)

    def test_kinds_that_need_a_prompt_are_left_out_with_it(self, tiny, monkeypatch):
        monkeypatch.setattr(TimedModel, "prefill", lambda self, c, b: Prefill(100.0, None))
        found = bench([tiny], ("dynamic", "h2o:8"), contexts=(16, 32), repeats=1)
        assert [bool(row.skipped) for row in found.rows] == [False, False, False, True]
        assert "reading its prompt" in found.rows[3].skipped


class TestKnee:
    def test_it_is_where_the_cache_equals_the_weights(self):
        assert knee_tokens([(100, 1000), (200, 2000)], 1500) == 150
        assert knee_tokens([(100, 1000), (200, 2000)], 500) == 50
        assert knee_tokens([(100, 1000), (200, 2000)], 8000) == 800
        assert knee_tokens([(200, 2000), (100, 1000)], 1500) == 150

    def test_a_window_has_none(self):
        assert knee_tokens([(100, 1000), (200, 1000)], 1500) is None
        assert knee_tokens([(100, 1000), (200, 1000)], 500) == 50

    def test_fewer_heads_and_smaller_batches_have_it_later(self, tiny):
        smaller = load_model("tiny")
        smaller.model = convert_model(smaller.model, num_kv_heads=2)
        smaller.name = "smaller"
        found = bench([tiny, smaller], batches=(1, 2))
        knees = {(knee.label, knee.batch): knee.tokens for knee in found.knees}
        assert knees["tiny", 1] == pytest.approx(7_377_408 / 4096, abs=1)
        assert knees["tiny", 2] == pytest.approx(knees["tiny", 1] / 2, abs=1)
        assert knees["smaller", 1] > 3 * knees["tiny", 1]


class TestFile:
    def test_it_is_written_and_holds_everything(self, tiny, tmp_path):
        found = bench([tiny], out=tmp_path)
        content = json.loads((tmp_path / "bench.json").read_text())
        assert content == json.loads(json.dumps(found.to_json()))
        assert {"settings", "machine", "versions", "bandwidth", "rows", "knees"} <= set(content)
        assert content["bandwidth"]["bytes_per_s"] == 2e9
        assert content["models"][0]["weights_sha256"] == tiny.weights_sha256
        assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]

    def test_what_was_measured_stays_when_a_run_stops(self, tiny, tmp_path):
        def stop(done: str) -> None:
            if done.startswith("32"):
                raise KeyboardInterrupt

        settings = BenchSettings((16, 32, 64), new_tokens=1, repeats=1, warmup=0)
        with pytest.raises(KeyboardInterrupt):
            run_bench(
                [tiny], [cache_kind("dynamic")], settings, out=tmp_path, bandwidth=BANDWIDTH,
                progress=stop,
            )  # fmt: skip
        content = json.loads((tmp_path / "bench.json").read_text())
        assert [row["context"] for row in content["rows"]] == [16, 32]

    def test_random_filling_is_told(self, tiny):
        assert any("random keys and values" in note for note in bench([tiny]).notes)
        assert not any("random keys" in n for n in bench([tiny], fill="prompt").notes)


class TestSettings:
    @pytest.mark.parametrize(
        "wrong",
        [{"contexts": ()}, {"contexts": (0,)}, {"repeats": 0}, {"warmup": -1}, {"batches": (0,)}],
    )
    def test_counts_that_make_no_sense_are_refused(self, wrong):
        with pytest.raises(UsageError):
            BenchSettings(**{"contexts": (8,), **wrong})
