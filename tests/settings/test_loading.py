"""Loading: all faults at once, each with its place; overrides; numbers as people write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from gqaconvert.errors import UsageError
from gqaconvert.settings.loading import load_settings, make_settings
from gqaconvert.settings.recipe import Recipe

GOOD = """version: 1
source: {model: tiny, pretraining_tokens: 2e12}
convert: {kv_heads: 2}
uptrain:
  data:
    datasets:
      - {path: bundled}
  budget: {tokens: 1_000_000}
  batch_tokens: 8192
  lr: 1e-3
"""
BAD = """version: true
source:
  model: tiny
  pretraning_tokens: 2e12
convert:
  kv_heads: 2
  kv_heads: 3
  method: men
  dtype: int8
uptrain:
  data:
    datasets:
      - path: bundled
        loss_on: replies
      - {weight: 0}
    context: 1000
  batch_tokens: 8192
  lr: -1
  betas: [0.9, 1.5]
  stages: [{share: 0.5}]
  budget: {steps: 3, alpha: 0.1}
  schedule: {kind: wsd, warmup: 0.5, decay: 0.6}
  compile: maybe
  teacher: {cache: x}
  loss: {hidden: 1}
  lora: false
report: quick
"""
NO_NUMBER = "input should be a valid number, unable to parse string as a number"
FAULTS = """
line 1: version: needs a number, not true
line 4: source.pretraning_tokens: no such key; pretraining_tokens?
line 7: convert.kv_heads: given twice, first on line 6
line 8: convert.method: input should be 'mean', 'first', 'random', 'procrustes' or 'svd'
line 9: convert.dtype: 'int8' is not a type for weights; keep, float32, bfloat16 or float16
line 10: uptrain: the shares of stages add up to 0.5, not 1
line 10: uptrain: batch_tokens 8192 is no multiple of data.context 1000
line 10: uptrain: teacher.cache holds no hidden states; set loss.hidden and .attention to 0
line 13: uptrain.data.datasets.0: loss_on: replies needs messages, the key of the chat in a row
line 15: uptrain.data.datasets.1.path: missing
line 15: uptrain.data.datasets.1.weight: input should be greater than 0
line 18: uptrain.lr: input should be greater than 0
line 19: uptrain.betas.1: input should be less than 1
line 21: uptrain.budget: give exactly one of tokens, steps and alpha
line 22: uptrain.schedule: warmup and decay add up to 1.1 of 1
line 23: uptrain.compile: input should be a valid boolean, unable to interpret input
line 26: uptrain.lora: needs keys and values: rank, alpha, dropout, target, train_kv
line 27: report: needs keys and values: title, gpu
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "mine.yaml").write_text(GOOD)
    return tmp_path / "mine.yaml"


def refusal(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(UsageError) as caught:
        load_settings(Recipe, path, overrides)
    assert caught.value.at == str(path)
    assert caught.value.exit_code == 2
    return caught.value.what.splitlines()


class TestFaults:
    def test_all_are_told_at_once_with_their_lines(self, path):
        path.write_text(BAD)
        count, *lines = refusal(path)
        assert lines == FAULTS.strip().splitlines()
        assert count == f"{len(lines)} faults"

    def test_one_is_told_on_one_line(self, path):
        path.write_text(GOOD.replace("1e-3", "0"))
        assert refusal(path) == ["line 10: uptrain.lr: input should be greater than 0"]

    def test_a_wrong_value_hides_no_comparison_and_invents_none(self, path):
        path.write_text(GOOD.replace("8192", "8000").replace("1e-3", "none"))
        assert refusal(path)[1:] == [
            "line 4: uptrain: batch_tokens 8000 is no multiple of data.context 1024",
            f"line 10: uptrain.lr: {NO_NUMBER}",
        ]
        # Without its wrong context this recipe would be compared with the default of 1024.
        path.write_text(
            GOOD.replace("8192", "512").replace("  data:\n", "  data:\n    context: wide\n")
        )
        (only,) = refusal(path)
        assert only.startswith("line 6: uptrain.data.context: input should be a valid integer")

    def test_alpha_needs_what_it_refers_to(self, path):
        path.write_text(
            GOOD.replace(", pretraining_tokens: 2e12", "").replace("tokens: 1_000_000", "alpha: .1")
        )
        assert refusal(path) == ["uptrain.budget.alpha needs source.pretraining_tokens"]

    def test_a_recipe_distils_in_one_place(self, path):
        path.write_text(GOOD.replace("kv_heads:", "distill_steps: 5, kv_heads:"))
        assert refusal(path) == ["uptrain distils; leave convert.distill_steps out"]

    def test_missing_sections_and_an_empty_list(self, path):
        path.write_text("version: 1\nuptrain:\n  data:\n    datasets: []\n  lr: 1\n")
        assert refusal(path)[1:] == [
            "source: missing",
            "convert: missing",
            "line 2: uptrain.budget: missing",
            "line 2: uptrain.batch_tokens: missing",
            "line 4: uptrain.data.datasets: needs at least 1 of them",
        ]

    def test_a_key_like_no_other_names_those_there_are(self, path):
        path.write_text(GOOD + "report: {zzz: 1}\n")
        assert refusal(path) == ["line 11: report.zzz: no such key; there are title, gpu"]

    @pytest.mark.parametrize("value", ["true", "false"])
    @pytest.mark.parametrize("key", ["kv_heads", "seed"])
    def test_truth_is_no_number(self, path, key, value):
        (only,) = refusal(path, f"convert.{key}={value}")
        assert only == f"--set: convert.{key}: needs a number, not {value}"

    @pytest.mark.parametrize("content", ["", "- 1\n", "word"])
    def test_no_keys_at_all(self, path, content):
        path.write_text(content)
        assert refusal(path) == ["there are no keys and values in it"]

    def test_infinite_values_are_refused(self, path):
        path.write_text(GOOD.replace("2e12", "1e999"))
        assert refusal(path) == [
            "line 2: source.pretraining_tokens: input should be a finite number"
        ]

    def test_settings_of_no_file(self):
        with pytest.raises(UsageError) as caught:
            make_settings(Recipe, {"version": 2}, at="the options", remedy="look")
        assert "source: missing" in caught.value.what
        assert (caught.value.at, caught.value.remedy) == ("the options", "look")


class TestOverrides:
    def test_they_replace_what_is_written(self, path):
        recipe = load_settings(
            Recipe,
            path,
            [
                "uptrain.lr=1e-4",
                "uptrain.stages=[{share: 0.25, train: kv}, {share: 0.75}]",
                "uptrain.data.datasets.0.weight=3",
                "uptrain.budget={alpha: 1e-3}",
                "source.revision='2024'",
                "evaluate.suite=standard",
                "uptrain.seed=1",
                "uptrain.seed=2",
            ],
        )
        assert recipe.uptrain.lr == 1e-4
        assert [stage.train for stage in recipe.uptrain.stages] == ["kv", "all"]
        assert recipe.uptrain.data.datasets[0].weight == 3
        assert recipe.uptrain.budget.alpha == 1e-3
        assert recipe.source.revision == "2024"
        assert recipe.evaluate.suite == "standard"
        assert recipe.uptrain.seed == 2

    def test_an_empty_value_is_none(self, path):
        assert load_settings(Recipe, path, ["uptrain="]).uptrain is None
        assert load_settings(Recipe, path, ["uptrain.held_out=null"]).uptrain.held_out is None

    def test_they_mend_a_faulty_file(self, path):
        path.write_text(GOOD.replace("lr: 1e-3", "lr: -1"))
        assert load_settings(Recipe, path, ["uptrain.lr=1"]).uptrain.lr == 1

    def test_their_faults_name_them(self, path):
        assert refusal(
            path,
            "uptrain.eps=abc",
            "word",
            "uptrain..lr=1",
            "uptrain.shedule.kind=linear",
            "uptrain.lr.x=3",
            "uptrain.data.datasets.7.path=a",
            "uptrain.data.datasets.7=a",
            "uptrain.seed=[",
            "convert={kv_heads: 2, kv_heads: 4}",
        )[1:] == [
            "--set: 'word' is not KEY=VALUE, such as uptrain.lr=1e-4",
            "--set: 'uptrain..lr=1' is not KEY=VALUE, such as uptrain.lr=1e-4",
            "--set: uptrain.lr.x: there is no section uptrain.lr",
            "--set: uptrain.data.datasets.7.path: there is no section uptrain.data.datasets.7",
            "--set: uptrain.data.datasets.7: a number below 1 chooses an element",
            "--set: uptrain.seed: not YAML: expected the node content, but found '<stream end>'",
            "--set: convert.kv_heads: given twice, first on line 1",
            f"--set: uptrain.eps: {NO_NUMBER}",
            "--set: uptrain.shedule: no such key; schedule?",
        ]

    def test_what_is_compared_with_an_override_keeps_its_line(self, path):
        (only,) = refusal(path, "uptrain.data.context=1000")
        assert only == "line 4: uptrain: batch_tokens 8192 is no multiple of data.context 1000"
