"""Tasks through lm-eval, offline."""

from __future__ import annotations

import importlib.util
import json

import pytest

from gqaconvert.corpus.windows import Window
from gqaconvert.errors import GqaconvertError, UsageError
from gqaconvert.evaluation.scoring import score
from gqaconvert.evaluation.tasks import BUNDLED_TASKS, bundled_tasks, measure_task
from gqaconvert.modelling.models import load_model

QUESTIONS = [
    json.loads(line)
    for line in (BUNDLED_TASKS / "continuation.jsonl").read_text(encoding="utf-8").splitlines()
]
LIMIT = 24

LOCAL = """
task: mine
dataset_path: json
dataset_kwargs:
  data_files: {test: questions.json}
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: right
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""


@pytest.fixture(scope="module")
def tiny():
    return load_model("tiny", dtype="float32")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")


def test_bundled_questions_have_four_different_answers_in_any_order():
    assert bundled_tasks() == ["continuation"]
    assert len(QUESTIONS) == 200
    assert all(len(set(row["choices"])) == 4 for row in QUESTIONS)
    places = [row["label"] for row in QUESTIONS]
    assert min(places.count(place) for place in range(4)) > 30


def test_bundled_task_is_scored_as_by_hand(tiny, capfd):
    found = measure_task(tiny, "continuation", settings={"a": 1}, limit=LIMIT, batch_size=4)
    right = 0
    for row in QUESTIONS[:LIMIT]:
        # Space at the end of a context belongs to the answer, as in lm-eval.
        context, losses = row["context"].rstrip(), []
        for choice in row["choices"]:
            begin, whole = (
                tiny.tokenizer(text)["input_ids"] for text in (context, row["context"] + choice)
            )
            window = Window(whole, len(begin), 1)
            losses.append(float(next(iter(score(tiny, [window]))).nll.sum()))
        right += losses.index(min(losses)) == row["label"]
    assert found.detail["all"]["acc,none"] == pytest.approx(right / LIMIT)
    assert right / LIMIT > 0.25
    assert found.detail["chance"] == 0.25
    assert found.n == LIMIT
    assert found.stderr == found.detail["all"]["acc_norm_stderr,none"] > 0
    assert found.metric == "task/continuation"
    assert "lm-eval" in found.versions
    assert capfd.readouterr() == ("", "")  # no bars, no complaints of git's


def test_own_task_finds_its_data_beside_it(tiny, tmp_path, monkeypatch):
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "mine.yaml").write_text(LOCAL)
    rows = [
        {"question": "def f(", "choices": ["self", "qqqq"], "right": 0},
        {"question": "import", "choices": ["zzzz", "sys", "qq"], "right": 1},
    ]
    (folder / "questions.json").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.chdir(tmp_path)
    found = measure_task(tiny, "tasks/mine.yaml", settings={})
    assert (found.metric, found.n) == ("task/mine", 2)
    assert found.value == 1
    assert found.detail["chance"] == pytest.approx((1 / 2 + 1 / 3) / 2)


def test_unknown_task_names_the_nearest(tiny):
    with pytest.raises(UsageError, match="no task 'continuaton'") as refusal:
        measure_task(tiny, "continuaton", settings={})
    assert "continuation" in str(refusal.value.remedy)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no such task file"), ("- 1\n", "not a task"), ("output_type: x\n", "needs the key")],
)
def test_bad_task_files_are_refused(tiny, tmp_path, content, message):
    path = tmp_path / "bad.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match=message):
        measure_task(tiny, str(path), settings={})


def test_missing_data_say_why(tiny, tmp_path):
    (tmp_path / "mine.yaml").write_text(LOCAL)
    with pytest.raises(GqaconvertError, match=r"mine\.yaml' cannot run: FileNotFound"):
        measure_task(tiny, str(tmp_path / "mine.yaml"), settings={})


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_missing_engine_says_so(tiny):
    with pytest.raises(GqaconvertError, match="vLLM cannot be used here"):
        measure_task(tiny, "continuation", settings={}, backend="vllm")


def test_unknown_backend_is_refused(tiny):
    with pytest.raises(UsageError, match="unknown backend"):
        measure_task(tiny, "continuation", settings={}, backend="hg")
