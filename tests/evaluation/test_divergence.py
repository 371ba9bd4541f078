"""Divergence from the source: exact, or from what was saved of it."""

from __future__ import annotations

import json

import pytest
import torch

from gqaconvert.corpus.text import load_text
from gqaconvert.corpus.windows import strided_windows
from gqaconvert.errors import UsageError
from gqaconvert.evaluation.divergence import LiveSource, check_tokenizers, measure_divergence
from gqaconvert.evaluation.saved_source import open_saved, save_source, source_identity
from gqaconvert.evaluation.scoring import Reader
from gqaconvert.modelling.models import ModelFolder, load_model


@pytest.fixture(scope="module")
def tiny():
    return load_model("tiny", dtype="float32")


@pytest.fixture(scope="module")
def pooled(tmp_path_factory):
    import gqaconvert

    folder = tmp_path_factory.mktemp("pooled") / "tiny-gqa2"
    gqaconvert.convert("tiny", folder, num_kv_heads=2)
    return load_model(folder, dtype="float32")


@pytest.fixture(scope="module")
def windows(tiny):
    return strided_windows(tiny.tokenizer, load_text(), length=96, stride=64, limit=5)


def _plain(source, model, windows):
    """KL and agreement of every scored token, with all logits at once."""
    kl, agree = [], []
    for window in windows:
        token_ids = torch.tensor([window.token_ids])
        with torch.no_grad():
            p, q = (
                each.model(input_ids=token_ids).logits[0, window.first_scored - 1 : -1].double()
                for each in (source, model)
            )
        p, q = p.log_softmax(-1), q.log_softmax(-1)
        kl.append((p.exp() * (p - q)).sum(-1))
        agree.append(p.argmax(-1) == q.argmax(-1))
    return torch.cat(kl), torch.cat(agree)


def _identity(tiny, windows, k, **placement):
    found = ModelFolder(tiny.name, tiny.folder, tiny.weights_sha256, None)
    return source_identity(found, windows, k, placement)


def test_a_model_does_not_diverge_from_itself(tiny, windows):
    found = measure_divergence(tiny, windows, LiveSource(tiny), settings={})
    assert found.value == pytest.approx(0, abs=1e-6)
    assert found.detail["top1_agreement"] == 1


@pytest.mark.parametrize("batch_size", [1, 3])
def test_equal_to_the_formula_over_all_logits(tiny, pooled, windows, batch_size):
    kl, agree = _plain(tiny, pooled, windows)
    found = measure_divergence(
        pooled, windows, LiveSource(tiny), settings={"s": 1}, batch_size=batch_size
    )
    assert found.value == pytest.approx(float(kl.mean()), rel=1e-4)
    assert found.detail["p99"] == pytest.approx(float(kl.quantile(0.99)), rel=1e-3)
    assert found.detail["top1_agreement"] == pytest.approx(float(agree.double().mean()))
    assert (found.n, found.unit, found.detail["source"]) == (5, "nats", "tiny")
    assert found.value > 0.5  # so it can tell them apart
    assert found.stderr > 0


def test_direction_is_from_source_to_model(tiny, pooled, windows):
    there = measure_divergence(pooled, windows, LiveSource(tiny), settings={}).value
    back = measure_divergence(tiny, windows, LiveSource(pooled), settings={}).value
    assert there != pytest.approx(back, rel=0.01)


def test_tokens_ruled_out_by_both_weigh_nothing(tiny, windows):
    source = load_model("tiny", dtype="float32")
    head = source.model.get_output_embeddings()
    never = torch.tensor([3])
    hook = head.register_forward_hook(lambda _m, _i, out: out.index_fill(-1, never, -torch.inf))
    try:
        found = measure_divergence(source, windows, LiveSource(source), settings={})
    finally:
        hook.remove()
    assert found.value == pytest.approx(0, abs=1e-6)


def test_saved_source_is_a_lower_bound_that_tightens(tiny, pooled, windows, tmp_path):
    exact = measure_divergence(pooled, windows, LiveSource(tiny), settings={})
    values = []
    for k in (4, 64, 2048):
        identity = _identity(tiny, windows, k)
        saved = save_source(tiny, windows, tmp_path / str(k), identity)
        found = measure_divergence(pooled, windows, saved, settings={})
        values.append(found.value)
        assert found.detail["top1_agreement"] == exact.detail["top1_agreement"]
        assert f"top {k}" in found.detail["method"]
    assert values[0] < values[1] < values[2]
    assert values[2] == pytest.approx(exact.value, rel=1e-4)
    assert values[1] == pytest.approx(exact.value, rel=0.1)


def test_equally_likely_tokens_are_no_disagreement(windows, tmp_path):
    coarse = load_model("tiny", dtype="float32")
    # Large logits in bfloat16 take few values, too.
    coarse.model.get_output_embeddings().register_forward_hook(lambda _m, _i, out: out.round())
    logits = torch.cat([chunk for window in windows for chunk in Reader(coarse).read([window])])
    ties = (logits == logits.amax(-1, keepdim=True)).sum(-1) > 1
    assert ties.double().mean() > 0.1
    saved = save_source(coarse, windows, tmp_path, _identity(coarse, windows, 32))
    found = measure_divergence(coarse, windows, saved, settings={})
    assert found.detail["top1_agreement"] == 1
    assert found.value == pytest.approx(0, abs=1e-6)


def test_saved_source_is_used_again_only_where_nothing_differs(tiny, pooled, windows, tmp_path):
    identity = _identity(tiny, windows, 16, dtype="float32")
    first = measure_divergence(
        pooled, windows, save_source(tiny, windows, tmp_path, identity), settings={}
    )
    again = measure_divergence(pooled, windows, open_saved(tmp_path, identity), settings={})
    assert again.value == first.value
    for other in (
        _identity(tiny, windows, 8, dtype="float32"),
        _identity(tiny, windows[:-1], 16, dtype="float32"),
        _identity(tiny, windows, 16, dtype="bfloat16"),
        {**identity, "weights_sha256": "other"},
    ):
        assert open_saved(tmp_path, other) is None


def test_a_stopped_save_is_not_used(tiny, windows, tmp_path):
    identity = _identity(tiny, windows, 16)

    class Stopped(Reader):
        def read(self, batch):
            yield from super().read(batch)
            raise KeyboardInterrupt

    save_source(tiny, windows, tmp_path, identity)
    with pytest.raises(KeyboardInterrupt):
        save_source(tiny, windows, tmp_path, identity, reader=Stopped(tiny))
    assert open_saved(tmp_path, identity) is None


def test_other_vocabularies_are_refused(tiny, windows, tmp_path):
    identity = _identity(tiny, windows, 16)
    saved = save_source(tiny, windows, tmp_path, identity)
    about = json.loads((tmp_path / "about.json").read_text())
    (tmp_path / "about.json").write_text(json.dumps({**about, "vocabulary": 2049}))
    with pytest.raises(UsageError, match="predicts 2049 tokens and the model 2048"):
        measure_divergence(tiny, windows, open_saved(tmp_path, identity), settings={})
    assert saved.method.startswith("top 16, remainder 0.")


def test_tokenizers_must_cut_alike(tiny):
    check_tokenizers(tiny.tokenizer, tiny.tokenizer, "any text", at="x")

    def bytewise(text, **_):
        return {"input_ids": list(text.encode())}

    with pytest.raises(UsageError, match="tokenizer differs") as refusal:
        check_tokenizers(tiny.tokenizer, bytewise, "any text", at="folder")
    assert refusal.value.at == "folder"
