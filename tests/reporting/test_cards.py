"""What was measured, in the model cards of exported checkpoints."""

from __future__ import annotations

import json

import pytest
from huggingface_hub import ModelCard
from saved_runs import PERPLEXITY, manifest, write_json, write_run

from gqaconvert.errors import CheckpointError
from gqaconvert.reporting.cards import BEGIN, END, write_cards


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run")


def test_both_checkpoints_get_their_own_figures(run):
    assert write_cards(run) == [run / "converted/README.md", run / "model/README.md"]
    for name in ("converted", "model"):
        card = ModelCard((run / name / "README.md").read_text(encoding="utf-8"))
        results = {each.metric_type: each for each in card.data.eval_results}
        assert results["perplexity"].metric_value == PERPLEXITY[name]
        assert results["perplexity"].dataset_name == "bundled"
        assert results["perplexity"].metric_args["context"] == 256
        assert results["acc_norm"].metric_value == 0.5
        assert results["acc_norm"].dataset_name == "continuation"
        assert card.data.pipeline_tag == "text-generation"
        assert card.data.license == "mit"
        assert card.data.tags == ["gqaconvert"]
        assert "base_model" not in card.data.to_dict()
    text = card.text
    assert "| Uptrained<br>model" in text
    assert "| Converted<br>" not in text
    assert text.index("Made so.") < text.index(BEGIN) < text.index(END)
    assert text.index(END) < text.index("## Card of the source model")
    assert text.rstrip().endswith("Its own words.")


def test_writing_again_changes_nothing(run):
    write_cards(run)
    before = (run / "model/README.md").read_bytes()
    write_cards(run)
    assert (run / "model/README.md").read_bytes() == before
    assert [p.name for p in (run / "model").iterdir() if p.name.startswith(".")] == []


def test_new_figures_take_the_place_of_old_ones(run):
    write_cards(run)
    path = run / "results/model/perplexity.json"
    content = json.loads(path.read_text())
    content["value"] = 19.5
    write_json(path, content)
    write_cards(run)
    text = (run / "model/README.md").read_text(encoding="utf-8")
    assert text.count(BEGIN) == 1
    assert "19.5" in text
    assert "25.8" not in text


def test_no_folder_of_this_machine_is_published(run):
    write_cards(run)
    text = (run / "model/README.md").read_text(encoding="utf-8")
    assert "--results results" not in text  # the stage's command, with its paths
    assert "gqaconvert evaluate tiny converted model --text bundled" in text


def test_a_source_on_the_hub_is_named(run):
    for name in ("converted", "model"):
        write_json(run / name / "gqaconvert.json", manifest(source="org/tiny"))
    write_cards(run)
    cards = [ModelCard((run / name / "README.md").read_text()) for name in ("converted", "model")]
    assert [card.data.base_model for card in cards] == ["org/tiny", "org/tiny"]
    relations = [card.data.to_dict().get("base_model_relation") for card in cards]
    assert relations == [None, "finetune"]  # the Hub has no word for a conversion


def test_what_the_card_says_stays(run):
    path = run / "model/README.md"
    path.write_text(
        "---\nbase_model: someone/else\npipeline_tag: text2text-generation\nmodel-index:\n"
        "- name: source\n  results: []\n---\n\n# Mine\n"
    )
    write_cards(run)
    card = ModelCard(path.read_text())
    assert card.data.base_model == "someone/else"
    assert card.data.pipeline_tag == "text2text-generation"
    assert card.data.model_name == "tiny-gqa2"  # not what was measured on the source
    assert card.text.startswith("# Mine") or card.text.lstrip().startswith("# Mine")


def test_folders_of_others_are_left_alone(run):
    (run / "converted/gqaconvert.json").unlink()
    before = (run / "converted/README.md").read_bytes()
    assert write_cards(run) == [run / "model/README.md"]
    assert (run / "converted/README.md").read_bytes() == before


def test_damage_is_an_error_before_anything_is_written(run):
    before = (run / "converted/README.md").read_bytes()
    (run / "results/model/perplexity.json").write_text("{")
    with pytest.raises(CheckpointError, match="no report"):
        write_cards(run)
    assert (run / "converted/README.md").read_bytes() == before
