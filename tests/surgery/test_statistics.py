"""The calibration file: whole or not there, read by layer, and of one model alone."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file
from zoo import build, save

from gqaconvert.checkpoint.fingerprint import fingerprint_model
from gqaconvert.checkpoint.index import read_index
from gqaconvert.errors import CheckpointError, RefusedError
from gqaconvert.surgery.layer_heads import LayerStatistics
from gqaconvert.surgery.statistics import (
    StatisticsFile,
    StatisticsIdentity,
    TextIdentity,
    merge,
    statistics_bytes,
    write_statistics,
)

WIDTH = 5


def identity(tokens: int = 100, **changes: object) -> StatisticsIdentity:
    texts = (TextIdentity("a.txt", "0" * 64, tokens),)
    plain = StatisticsIdentity("model", "llama", "headers", "weights", texts, tokens, 32)
    return replace(plain, **changes)


def moments(seed: int, tokens: int = 100, *, attended: bool = True) -> LayerStatistics:
    rows = np.random.default_rng(seed).normal(size=(3, 2 * WIDTH, WIDTH))
    inputs, averaged, received = np.einsum("ntx,nty->nxy", rows, rows)
    return LayerStatistics(inputs, averaged, received if attended else None, tokens)


def test_what_is_written_is_read_one_layer_at_a_time(tmp_path):
    path = tmp_path / "model.moments"
    layers = {3: moments(3, attended=False), 0: moments(0)}
    write_statistics(path, identity(), layers)
    found = StatisticsFile(path)
    assert list(found) == [0, 3]
    assert found.identity == identity()
    assert statistics_bytes(found.widths) == 4 * WIDTH**2 * 5
    np.testing.assert_array_equal(found[0].averaged, layers[0].averaged.astype(np.float32))
    assert found.layer(0).inputs.dtype == np.float64
    assert found[3].attended is None
    assert found[3].tokens == 100
    assert 3 in found
    assert 1 not in found
    assert sorted(load_file(path)) == [  # an ordinary safetensors file
        "layers.0.attended", "layers.0.averaged", "layers.0.inputs",
        "layers.3.averaged", "layers.3.inputs",
    ]  # fmt: skip


def test_pairs_are_streamed_and_must_be_what_was_announced(tmp_path):
    path, layers = tmp_path / "s", {0: moments(0), 1: moments(1)}
    widths = {n: dict.fromkeys(("inputs", "averaged", "attended"), WIDTH) for n in layers}
    write_statistics(path, identity(), iter(layers.items()), widths=widths)
    assert list(StatisticsFile(path)) == [0, 1]
    for wrong in ([(0, moments(0))], [(1, moments(1)), (0, moments(0))]):
        with pytest.raises(ValueError, match="layer"):
            write_statistics(tmp_path / "t", identity(), iter(wrong), widths=widths)
    assert [p.name for p in tmp_path.iterdir()] == ["s"]


def test_an_existing_file_is_kept_and_a_failing_run_leaves_nothing(tmp_path):
    path = tmp_path / "s"
    write_statistics(path, identity(), {0: moments(0)})
    with pytest.raises(RefusedError):
        write_statistics(path, identity(), {0: moments(1)})

    def failing():
        yield 0, moments(1)
        raise KeyboardInterrupt

    widths = {0: {"inputs": WIDTH, "averaged": WIDTH, "attended": WIDTH}, 1: {"inputs": WIDTH}}
    with pytest.raises(KeyboardInterrupt):
        write_statistics(path, identity(), failing(), widths=widths, overwrite=True)
    np.testing.assert_allclose(StatisticsFile(path)[0].inputs, moments(0).inputs, rtol=1e-6)
    assert [p.name for p in tmp_path.iterdir()] == ["s"]


def test_the_digest_changes_with_content_and_identity(tmp_path):
    digests = set()
    for number, (what, layers) in enumerate(
        [
            (identity(), {0: moments(0)}),
            (identity(), {0: moments(1)}),
            (identity(tokens=101), {0: moments(0)}),
            (identity(), {1: moments(0)}),
        ]
    ):
        write_statistics(tmp_path / str(number), what, layers)
        digests.add(StatisticsFile(tmp_path / str(number)).digest)
    assert len(digests) == 4
    shutil.copy(tmp_path / "0", tmp_path / "copy")
    assert StatisticsFile(tmp_path / "copy").digest in digests


def test_statistics_of_another_model_are_refused(tmp_path):
    folder = save(build("llama"), tmp_path / "model")
    index = read_index(folder)
    of_model = identity(
        source_fingerprint=index.fingerprint(), weights_sha256=fingerprint_model(folder)
    )
    write_statistics(tmp_path / "s", of_model, {0: moments(0)})
    found = StatisticsFile(tmp_path / "s")
    found.check(folder)
    with pytest.raises(RefusedError, match=r"another model \(model\): weights") as refused:
        found.check(save(build("llama", seed=1), tmp_path / "same shapes"))
    assert refused.value.exit_code == 4
    with pytest.raises(RefusedError, match="names, types, shapes"):
        found.check(save(build("qwen2"), tmp_path / "another class"))


def test_merging_weighs_by_tokens():
    first, second = moments(0, 100), moments(1, 300)
    both = merge(first, second)
    np.testing.assert_allclose(both.inputs, 0.25 * first.inputs + 0.75 * second.inputs)
    assert both.tokens == 400
    assert merge(first, moments(1, 300, attended=False)).attended is None


def test_damaged_and_foreign_files_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no such"):
        StatisticsFile(tmp_path / "none")
    model = save(build("llama"), tmp_path / "model") / "model.safetensors"
    with pytest.raises(CheckpointError, match="not a calibration file"):
        StatisticsFile(model)
    broken = replace(moments(0), inputs=np.full((WIDTH, WIDTH), np.nan))
    write_statistics(tmp_path / "nan", identity(), {0: broken})
    with pytest.raises(CheckpointError, match="not finite"):
        StatisticsFile(tmp_path / "nan").layer(0)
    write_statistics(tmp_path / "old", identity(), {0: moments(0)})
    content = (tmp_path / "old").read_bytes()
    (tmp_path / "old").write_bytes(content.replace(b'\\"version\\": 1', b'\\"version\\": 9'))
    assert json.dumps({"version": 9})[1:-1].replace('"', '\\"').encode() in (
        (tmp_path / "old").read_bytes()
    )
    with pytest.raises(CheckpointError, match="version 9"):
        StatisticsFile(tmp_path / "old")
