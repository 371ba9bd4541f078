"""Figures are pure functions of saved results: drawn again, they are the same bytes."""

from __future__ import annotations

import copy
import json
import xml.etree.ElementTree as ElementTree

import pytest

from gqaconvert.errors import UsageError
from gqaconvert.evaluation.head_similarity import head_similarity
from gqaconvert.figure_style import COLOURS, MARKERS, format_tokens
from gqaconvert.reporting.figures.bench import draw_bench
from gqaconvert.reporting.figures.heads import draw_heads
from gqaconvert.reporting.figures.sweep import draw_sweep


def timing(seconds: float) -> dict:
    return {"median_s": seconds, "min_s": 0.9 * seconds, "max_s": 1.2 * seconds}


def bench() -> dict:
    models = ("a-mha", "a")
    rows = [
        {
            "label": model, "model": model, "context": context, "batch": batch,
            "decode": timing(0.01 + context * batch * share * 1e-6),
            "cache_bytes": context * batch * share, "bound_tokens_per_s": 1e3 * batch,
        }
        for model, share in zip(models, (4096, 512), strict=True)
        for context in (256, 1024, 4096)
        for batch in (1, 8)
    ]  # fmt: skip
    return {
        "rows": rows,
        "knees": [
            {"label": "a-mha", "batch": 1, "tokens": 2000},
            {"label": "a-mha", "batch": 8, "tokens": None},
            {"label": "a", "batch": 8, "tokens": 2100},
            {"label": "a", "batch": 1, "tokens": 1_000_000},
        ],
        "models": [
            {"name": model, "read_bytes": 8_000_000, "dtype": "bfloat16", "attn": "sdpa"}
            for model in models
        ],
        "bandwidth": {"bytes_per_s": 2e10},
        "machine": {"threads": 2, "gpu": None},
        "device": "cpu",
        "settings": {"repeats": 5},
    }


def sweep() -> dict:
    def point(kind, heads, method, quality, top1=None, cache="dynamic", share=1.0):
        return {
            "kind": kind, "kv_heads": heads, "method": method, "cache_kind": cache,
            "kv_bytes": int(heads * 2**18 * share) if quality else None, "kv_tokens": 511,
            "quality": quality, "top1": top1, "top1_stderr": 0.01 if top1 else None,
        }  # fmt: skip

    return {
        "source": "tiny",
        "settings": {"windows": 16, "context": 512, "text_name": "bundled"},
        "points": [
            point("source", 8, None, 1.0),
            point("cache", 8, None, 1.0),
            point("cache", 8, None, 0.99, cache="quantised:int4", share=0.3),
            point("cache", 8, None, None, cache="offloaded"),
            point("conversion", 4, "mean", 0.4, 0.6),
            point("cache", 4, "mean", 0.38, cache="quantised:int4", share=0.3),
            point("conversion", 1, "mean", 0.1, 0.3),
        ],
    }


@pytest.fixture(scope="module")
def heads() -> dict:
    return head_similarity("tiny").to_json()


def texts(path) -> str:
    """What can be read in an SVG: matplotlib leaves texts as comments beside their outlines."""
    parser = ElementTree.XMLParser(target=ElementTree.TreeBuilder(insert_comments=True))
    tree = ElementTree.parse(path, parser)
    return "\n".join(
        (node.text or "").strip() for node in tree.iter() if node.tag is ElementTree.Comment
    )


class TestAllFigures:
    @pytest.mark.parametrize(("draw", "make"), [(draw_bench, bench), (draw_sweep, sweep)])
    def test_the_same_results_give_the_same_bytes(self, draw, make, tmp_path):
        for ending in ("svg", "png", "pdf"):
            before, content = tmp_path / f"a.{ending}", make()
            draw(content, before)
            assert content == make()
            after = tmp_path / f"b.{ending}"
            draw(json.loads(json.dumps(content)), after)
            assert before.read_bytes() == after.read_bytes()

    def test_another_result_gives_another_figure(self, tmp_path):
        content = copy.deepcopy(bench())
        draw_bench(content, tmp_path / "a.svg")
        content["rows"][0]["decode"] = timing(0.5)
        draw_bench(content, tmp_path / "b.svg")
        assert (tmp_path / "a.svg").read_bytes() != (tmp_path / "b.svg").read_bytes()

    def test_other_endings_are_refused(self, tmp_path, heads):
        for draw, content in ((draw_bench, bench()), (draw_sweep, sweep()), (draw_heads, heads)):
            with pytest.raises(UsageError, match="no kind of figure"):
                draw(content, tmp_path / "figure.docx")

    def test_things_are_told_apart_without_colour(self):
        assert len(set(COLOURS)) == len(set(MARKERS)) == 7


class TestBench:
    def test_axes_have_units_and_knees_are_marked(self, tmp_path):
        draw_bench(bench(), tmp_path / "bench.svg")
        read = texts(tmp_path / "bench.svg")
        for word in ("KV cache", "MiB", "time per token, ms", "context, tokens", "a-mha, batch 8",
                     "bound at 20 GB/s, measured in this run", "weights read in a step",
                     "as long as reading the weights, by bytes"):  # fmt: skip
            assert word in read, word
        assert "knee 1.95k" in read
        assert "knee 2.05k" in read
        assert "knee 977k" not in read  # far outside of what was measured

    def test_nothing_measured_is_nothing_drawn(self, tmp_path):
        content = bench()
        for row in content["rows"]:
            row["decode"] = None
        with pytest.raises(UsageError, match="nothing to draw"):
            draw_bench(content, tmp_path / "bench.svg")

    def test_tokens_are_written_short(self):
        assert [format_tokens(n) for n in (512, 1024, 1536, 131072)] == [
            "512",
            "1k",
            "1.5k",
            "128k",
        ]


class TestSweep:
    def test_conversions_and_cache_kinds_are_there(self, tmp_path):
        draw_sweep(sweep(), tmp_path / "sweep.svg")
        read = texts(tmp_path / "sweep.svg")
        for word in ("mean", "quantised:int4", "KV cache of one text of 511 tokens",
                     "quality kept: source perplexity ÷ perplexity", "1 head", "8 heads",
                     "top-1 agreement with the source", "16 windows of 512 tokens"):  # fmt: skip
            assert word in read, word
        assert "offloaded" not in read


class TestHeads:
    def test_layers_pairs_and_noise_are_told(self, tmp_path, heads):
        draw_heads(heads, tmp_path / "heads.svg")
        read = texts(tmp_path / "heads.svg")
        for word in ("layer", "keys, as they are", "values, aligned", "noise reaches 0.29",
                     "pairs of KV heads, by how far apart", "cosine of weights"):  # fmt: skip
            assert word in read, word

    def test_few_pairs_are_named(self, tmp_path, heads):
        few = copy.deepcopy(heads)
        for layer in few["layers"]:
            layer["kv_heads"] = 3
        draw_heads(few, tmp_path / "heads.svg")
        assert "0–2" in texts(tmp_path / "heads.svg")

    def test_layers_without_values_of_their_own_are_left_blank(self, tmp_path, heads):
        without = copy.deepcopy(heads)
        without["layers"][1]["values"] = None
        draw_heads(without, tmp_path / "some.png")
        for layer in without["layers"]:
            layer["values"] = None
        draw_heads(without, tmp_path / "none.svg")
        assert "values" not in texts(tmp_path / "none.svg")
