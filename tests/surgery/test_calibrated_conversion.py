"""Calibrated conversions on disk: layer by layer, resumable, reported and verified.

What the methods compute is tested on arrays and in the round trip; here it is how plans run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scrambling import gather_inputs, open_model
from typer.testing import CliRunner
from zoo import build, largest_difference, load_cleanly, logits, save
from zoo_proofs import check_cached_generation, read_tensors

import gqaconvert
from gqaconvert.checkpoint.fingerprint import fingerprint_model
from gqaconvert.checkpoint.index import read_index
from gqaconvert.cli.main import app
from gqaconvert.errors import CheckpointError, RefusedError, UsageError, VerificationError
from gqaconvert.surgery import layer_pooling
from gqaconvert.surgery.layer_heads import LayerReport
from gqaconvert.surgery.layer_tensors import query_order
from gqaconvert.surgery.options import ConversionOptions
from gqaconvert.surgery.predict import predict_conversion
from gqaconvert.surgery.statistics import (
    StatisticsFile,
    StatisticsIdentity,
    TextIdentity,
    write_statistics,
)


def calibrated(name: str, folder: Path, *, shards: int = 1, **options) -> tuple[Path, Path]:
    """A saved model and its calibration file."""
    model = build(name, **options)
    source = save(model, folder / "source", shards=shards)
    index = read_index(source)
    identity = StatisticsIdentity(
        model=name,
        model_type=model.config.model_type,
        source_fingerprint=index.fingerprint(),
        weights_sha256=fingerprint_model(source, index),
        texts=(TextIdentity("random", "0" * 64, 576),),
        tokens=576,
        context=24,
    )
    write_statistics(folder / "moments", identity, gather_inputs(open_model(model)))
    return source, folder / "moments"


def same_tensors(a: Path, b: Path) -> bool:
    left, right = read_tensors(a), read_tensors(b)
    return left.keys() == right.keys() and all(left[key].equal(right[key]) for key in left)


def averaged(heads, statistics, *, num_kv_heads, **_):
    """Stands in for a method: the mean of neighbours, as the method `mean` takes it."""
    size = heads.num_kv_heads // num_kv_heads
    groups = [tuple(range(n * size, (n + 1) * size)) for n in range(num_kv_heads)]

    def mean(rows):
        return np.stack([rows[list(group)].mean(axis=0) for group in groups])

    pooled = replace(heads, key=mean(heads.key), value=mean(heads.value))
    return pooled, LayerReport(tuple(groups), 0.5, 0.25, None, ())


def shuffled(heads, statistics, *, num_kv_heads, **_):
    """Stands in for a method: the mean of heads that are not neighbours."""
    groups = [tuple(range(n, heads.num_kv_heads, num_kv_heads)) for n in range(num_kv_heads)]
    order = query_order(groups, heads.num_heads)
    pooled = replace(
        heads,
        query=heads.query[order],
        key=np.stack([heads.key[list(group)].mean(axis=0) for group in groups]),
        value=np.stack([heads.value[list(group)].mean(axis=0) for group in groups]),
        output=heads.output[:, order],
    )
    return pooled, LayerReport(tuple(groups), 0.0, 0.0, None, ())


LAYOUTS = ["llama-bias", "olmo2", "stablelm-qk_norm", "phi3", "falcon-new-bias", "gpt_bigcode",
           "gpt_oss", "zamba2"]  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("shards", [1, 3])
def test_averaging_layer_by_layer_is_the_method_mean(name, shards, tmp_path, monkeypatch):
    monkeypatch.setattr(layer_pooling, "pool_layer", averaged)
    kv_heads = 1 if name == "gpt_bigcode" else 2
    source = save(build(name), tmp_path / "source", shards=shards)
    gqaconvert.convert(source, tmp_path / "mean", num_kv_heads=kv_heads)
    conversion = gqaconvert.convert(
        source, tmp_path / "layers", num_kv_heads=kv_heads, method="procrustes"
    )
    assert same_tensors(tmp_path / "mean", tmp_path / "layers")
    assert bool(conversion.plan.layers) == (name != "zamba2")
    if shards > 1:
        assert len({tensor.output.file for tensor in conversion.plan.tensors}) > 1


@pytest.mark.parametrize("name", ["gpt_oss", "olmo2", "cohere-qk_norm", "chameleon", "lfm3"])
def test_what_belongs_to_query_heads_moves_with_them(name, tmp_path, monkeypatch):
    """With equal heads in each group that is not of neighbours, nothing is lost."""
    monkeypatch.setattr(layer_pooling, "pool_layer", shuffled)
    model = build(name)
    opened = open_model(model)
    for block, freedom in opened.blocks:
        heads = opened.heads(block, freedom)
        twins = [n % 2 for n in range(heads.num_kv_heads)]
        opened.put_heads(block, replace(heads, key=heads.key[twins], value=heads.value[twins]))
        for tensor in block.head_tensors:
            if tensor.role == "key_norm":
                rows = opened.read(tensor.name)
                parts = rows.reshape(heads.num_kv_heads, -1)[twins]
                opened.put({tensor.name: parts.reshape(rows.shape)})
    before = logits(model)
    source = save(model, tmp_path / "source")
    gqaconvert.convert(
        source, tmp_path / "out", num_kv_heads=2, method="procrustes", grouping="similarity"
    )
    assert largest_difference(logits(load_cleanly(tmp_path / "out")), before) < 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama-bias", "qwen3", "glm", "phi3", "gpt_bigcode", "llava"])
def test_svd_writes_a_checkpoint_that_loads_verifies_and_equals_the_one_in_memory(
    name, dtype, tmp_path
):
    import torch

    kv_heads = 1 if name == "gpt_bigcode" else 2
    source, moments = calibrated(name, tmp_path, shards=2, dtype=getattr(torch, dtype))
    out = tmp_path / "out"
    conversion = gqaconvert.convert(
        source, out, num_kv_heads=kv_heads, statistics=moments, grouping="similarity"
    )
    assert conversion.plan.options.method == "svd"
    model = load_cleanly(out)
    assert str(model.dtype) == f"torch.{dtype}"
    if dtype == "float32":
        check_cached_generation(model, num_kv_heads=kv_heads)
    checks = {c.name: c.covered for c in gqaconvert.verify(out, source, deep=True).checks}
    assert "not recomputed" in checks["calibrated tensors"]

    manifest = json.loads((out / "gqaconvert.json").read_text())
    assert manifest["calibration"]["texts"] == [
        {"name": "random", "sha256": "0" * 64, "tokens": 576}
    ]
    assert len(manifest["layers"]) == 2
    for report in manifest["layers"]:
        assert sorted(n for group in report["groups"] for n in group) == [0, 1, 2, 3]
        assert 0 <= report["value_energy_lost"] <= 1
    if name != "llava":  # names differ on disk
        here = gqaconvert.convert_model(
            load_cleanly(source),
            num_kv_heads=kv_heads,
            statistics=StatisticsFile(moments),
            grouping="similarity",
        )
        for key, tensor in here.state_dict().items():
            assert tensor.equal(model.state_dict()[key]), key


def test_blocks_where_nothing_is_free_are_averaged_and_named(tmp_path):
    source = save(build("qwen3_next"), tmp_path / "source")
    gqaconvert.convert(source, tmp_path / "mean", num_kv_heads=2)
    out = gqaconvert.convert(source, tmp_path / "out", num_kv_heads=2, method="procrustes")
    assert same_tensors(tmp_path / "mean", tmp_path / "out")
    assert any("gated element by element" in notice for notice in out.notices)
    manifest = json.loads((tmp_path / "out" / "gqaconvert.json").read_text())
    assert all("gated" in layer["averaged"] for layer in manifest["layers"])
    gqaconvert.verify(tmp_path / "out", source)


class Counting:
    """A refinement that doubles every key, notes what it sees, and stops where it is told."""

    def __init__(self, stop_at: int | None = None, identity: str = "doubled") -> None:
        self.identity = identity
        self.seen: list[tuple[str, int]] = []
        self.keys: dict[int, np.ndarray] = {}
        self._stop_at = stop_at

    def __call__(self, layer, source, pooled, report):
        if layer == self._stop_at:
            raise KeyboardInterrupt
        assert source.num_kv_heads == 4
        self.seen.append(("refined", layer))
        self.keys[layer] = 2 * pooled.key
        return replace(pooled, key=self.keys[layer])

    def facts(self, layer) -> Mapping[str, float]:
        return {"fit_error_after": 0.5 + layer}

    def passed(self, layer, pooled) -> None:
        self.seen.append(("passed", layer))
        self.keys[layer] = pooled.key


@pytest.mark.parametrize(
    ("name", "kv_heads"), [("llama", 2), ("falcon-new", 2), ("gpt_bigcode", 1)]
)
def test_refinement_runs_in_layer_order_and_a_stopped_run_goes_on(name, kv_heads, tmp_path):
    source, moments = calibrated(name, tmp_path)

    def run(refine, out: str, *, resume: bool = False):
        return gqaconvert.convert(
            source,
            tmp_path / out,
            num_kv_heads=kv_heads,
            statistics=moments,
            refine=refine,
            resume=resume,
        )

    whole = Counting()
    conversion = run(whole, "whole")
    assert whole.seen == [("refined", 0), ("refined", 1)]
    assert conversion.plan.options.metric == "plain"
    manifest = json.loads((tmp_path / "whole" / "gqaconvert.json").read_text())
    assert [layer["fit_error_after"] for layer in manifest["layers"]] == [0.5, 1.5]
    gqaconvert.convert(
        source, tmp_path / "plain", num_kv_heads=kv_heads, statistics=moments, metric="plain"
    )
    assert not same_tensors(tmp_path / "plain", tmp_path / "whole")

    with pytest.raises(KeyboardInterrupt):
        run(Counting(stop_at=1), "parts")
    assert not (tmp_path / "parts").exists()
    with pytest.raises(RefusedError, match="other options"):
        run(Counting(identity="another"), "parts", resume=True)
    with pytest.raises(KeyboardInterrupt):
        run(Counting(stop_at=1), "parts2")
    rest = Counting()
    run(rest, "parts2", resume=True)
    assert rest.seen == [("passed", 0), ("refined", 1)]
    np.testing.assert_allclose(rest.keys[0], whole.keys[0], rtol=1e-5, atol=1e-6)
    assert same_tensors(tmp_path / "whole", tmp_path / "parts2")


@pytest.mark.parametrize("name", ["stablelm-qk_norm", "minimax_m3_vl_text-sparse"])
def test_heads_that_cannot_move_stay_with_their_neighbours(name, tmp_path):
    source = save(build(name), tmp_path / "source")
    conversion = gqaconvert.convert(
        source, tmp_path / "out", num_kv_heads=2, method="procrustes", grouping="similarity"
    )
    fixed = [layer for layer in conversion.plan.layers if layer.freedom.heads_fixed]
    assert fixed
    assert all(layer.grouping == "adjacent" for layer in fixed)
    assert any("stay with their neighbours" in notice for notice in conversion.notices)
    manifest = json.loads((tmp_path / "out" / "gqaconvert.json").read_text())
    modules = {layer.block.module for layer in fixed}
    groups = [layer["groups"] for layer in manifest["layers"] if layer["module"] in modules]
    assert groups == [[[0, 1], [2, 3]]] * len(fixed)


def test_plans_without_calibration_keep_the_digest_they_had():
    assert ConversionOptions(2).record() == {
        "num_kv_heads": 2, "method": "mean", "seed": 0, "dtype": None, "max_shard_bytes": None,
        "tensor_parallel": 1,
    }  # fmt: skip
    later = {"grouping": "similarity", "metric": "plain", "statistics_digest": "x", "refined": "y"}
    recorded = ConversionOptions(2, "svd", **later).record()
    assert ConversionOptions(**recorded) == ConversionOptions(2, "svd", **later)


def test_another_calibration_is_another_conversion(tmp_path):
    source, moments = calibrated("llama", tmp_path)
    file = StatisticsFile(moments)
    other = {n: replace(file[n], inputs=np.eye(33)) for n in file}
    write_statistics(tmp_path / "other", file.identity, other)
    plans = [
        gqaconvert.convert(
            source, tmp_path / "out", num_kv_heads=2, statistics=path, dry_run=True
        ).plan.digest()
        for path in (moments, tmp_path / "other")
    ]
    assert plans[0] != plans[1]


def test_a_changed_tensor_is_found(tmp_path):
    source, moments = calibrated("llama", tmp_path)
    gqaconvert.convert(source, tmp_path / "out", num_kv_heads=2, statistics=moments)
    name = "model.layers.1.self_attn.o_proj.weight"
    tensor = read_index(tmp_path / "out").tensors[name]
    content = bytearray((tmp_path / "out" / tensor.file).read_bytes())
    content[tensor.begin] ^= 1
    (tmp_path / "out" / tensor.file).write_bytes(content)
    with pytest.raises(VerificationError, match="changed after the conversion"):
        gqaconvert.verify(tmp_path / "out", source)


def test_what_makes_no_sense_is_refused(tmp_path):
    source, moments = calibrated("llama", tmp_path)
    out = tmp_path / "out"
    with pytest.raises(UsageError, match="svd needs a calibration") as refused:
        gqaconvert.convert(source, out, num_kv_heads=2, method="svd")
    assert "gqaconvert calibrate" in refused.value.remedy
    with pytest.raises(UsageError, match="moves heads"):
        gqaconvert.convert(source, out, num_kv_heads=2, grouping="similarity")
    with pytest.raises(UsageError, match="takes no calibration"):
        gqaconvert.convert(source, out, num_kv_heads=2, method="mean", statistics=moments)
    other = save(build("llama", seed=1), tmp_path / "other")
    with pytest.raises(RefusedError, match="another model"):
        gqaconvert.convert(other, out, num_kv_heads=2, statistics=moments)
    file = StatisticsFile(moments)
    write_statistics(tmp_path / "first", file.identity, {0: file[0]})
    with pytest.raises(CheckpointError, match="nothing on layer 1"):
        gqaconvert.convert(source, out, num_kv_heads=2, statistics=tmp_path / "first")
    narrow = {n: replace(file[n], inputs=np.eye(9)) for n in file}
    write_statistics(tmp_path / "narrow", file.identity, narrow)
    with pytest.raises(CheckpointError, match="inputs 8 wide"):
        gqaconvert.convert(source, out, num_kv_heads=2, statistics=tmp_path / "narrow")
    assert not out.exists()


def test_losses_are_told_before_anything_is_written(tmp_path):
    source, moments = calibrated("llama", tmp_path)
    predicted = predict_conversion(source, moments, [2, 1])
    assert list(predicted) == [2, 1]
    for module, report in predicted[1].items():
        assert report.value_energy_lost > predicted[2][module].value_energy_lost > 0
    dry = gqaconvert.convert(
        source, tmp_path / "out", num_kv_heads=2, statistics=moments, dry_run=True
    )
    assert dry.layers == predicted[2]
    gqaconvert.convert(source, tmp_path / "out", num_kv_heads=2, statistics=moments)
    manifest = json.loads((tmp_path / "out" / "gqaconvert.json").read_text())
    for layer in manifest["layers"]:
        told = dry.layers[layer["module"]]
        assert layer["key_energy_lost"] == pytest.approx(told.key_energy_lost)


def test_the_command_line_converts_with_a_calibration_and_tells_of_it(tmp_path):
    source, moments = calibrated("llama", tmp_path)
    run = CliRunner().invoke
    arguments = ["convert", str(source), str(tmp_path / "out"), "--kv-heads", "2"]
    dry = run(app, [*arguments, "--calibration", str(moments), "--dry-run"])
    assert dry.exit_code == 0, dry.output
    assert "V lost" in dry.output
    assert "fold" in dry.output
    done = run(app, [*arguments, "--calibration", str(moments), "--grouping", "similarity"])
    assert done.exit_code == 0, done.output
    assert "--calibration TEXT" not in done.output
    mean = run(app, [*arguments, "--overwrite"])
    assert "--calibration TEXT" in mean.output
