"""How alike heads are: what alignment must find, and what it must not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoints import llama_config, llama_tensors, write_llama, write_safetensors

from gqaconvert.errors import CheckpointError, UsageError
from gqaconvert.evaluation.head_alignment import (
    aligned_similarity,
    chance_similarity,
    head_products,
    key_freedom,
    pooled_share,
    raw_similarity,
    value_freedom,
)
from gqaconvert.evaluation.head_similarity import head_similarity

WIDTH, INPUTS = 8, 40


def draw(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((WIDTH, INPUTS), dtype=np.float32)


def rotation(seed: int = 1) -> np.ndarray:
    return np.linalg.qr(np.random.default_rng(seed).standard_normal((WIDTH, WIDTH)))[0]


def turned_in_planes(head: np.ndarray, planes: np.ndarray, seed: int = 2) -> np.ndarray:
    angles = np.random.default_rng(seed).uniform(0, 2 * np.pi, len(planes))
    out = head.copy()
    for (a, b), angle in zip(planes, angles, strict=True):
        out[a] = np.cos(angle) * head[a] - np.sin(angle) * head[b]
        out[b] = np.sin(angle) * head[a] + np.cos(angle) * head[b]
    return out


class TestAlignment:
    def test_equal_heads_are_alike_as_they_are(self):
        products = head_products([draw(), 3 * draw()])
        assert raw_similarity(products) == pytest.approx(np.ones((2, 2)))

    def test_unrelated_heads_are_not(self):
        assert abs(raw_similarity(head_products([draw(0), draw(1)]))[0, 1]) < 0.2

    def test_a_turned_value_head_is_recognised(self):
        products = head_products([draw(), rotation() @ draw()])
        assert raw_similarity(products)[0, 1] < 0.7
        assert aligned_similarity(products, value_freedom(WIDTH))[0, 1] == pytest.approx(1, 1e-5)

    @pytest.mark.parametrize("rope", ["halves", "adjacent"])
    def test_a_key_head_turned_in_the_planes_of_rope_is_recognised(self, rope):
        freedom = key_freedom(WIDTH, rope)
        products = head_products([draw(), turned_in_planes(draw(), freedom.planes)])
        assert aligned_similarity(products, freedom)[0, 1] == pytest.approx(1, 1e-5)
        other = key_freedom(WIDTH, "adjacent" if rope == "halves" else "halves")
        assert aligned_similarity(products, other)[0, 1] < 0.9

    def test_a_key_head_may_not_be_turned_otherwise(self):
        products = head_products([draw(), rotation() @ draw()])
        assert aligned_similarity(products, key_freedom(WIDTH, "halves"))[0, 1] < 0.9

    def test_a_plane_may_be_turned_but_not_mirrored(self):
        mirror = np.diag([1.0] * 4 + [-1.0] * 4)
        products = head_products([draw(), mirror @ draw()])
        assert aligned_similarity(products, key_freedom(WIDTH, "halves"))[0, 1] < 0.6
        assert aligned_similarity(products, value_freedom(WIDTH))[0, 1] == pytest.approx(1, 1e-5)

    def test_what_rope_leaves_alone_may_be_mixed(self):
        freedom = key_freedom(WIDTH, "halves", 0.5)
        assert freedom.planes.tolist() == [[0, 2], [1, 3]]
        assert freedom.free.tolist() == [4, 5, 6, 7]
        mixed = draw()
        mixed[4:] = np.linalg.qr(draw(3)[:4, :4])[0] @ mixed[4:]
        products = head_products([draw(), mixed])
        assert aligned_similarity(products, freedom)[0, 1] == pytest.approx(1, 1e-5)

    def test_without_rope_keys_are_as_free_as_values(self):
        assert key_freedom(WIDTH, "none").free.tolist() == list(range(WIDTH))

    def test_alignment_is_a_search_that_was_carried_out(self):
        """The closed form of a plane equals the best of many angles."""
        freedom = key_freedom(2, "halves")
        first, second = draw()[:2], draw(5)[:2]
        found = aligned_similarity(head_products([first, second]), freedom)[0, 1]
        best = max(
            np.vdot(first, [[np.cos(t), -np.sin(t)], [np.sin(t), np.cos(t)]] @ second)
            for t in np.linspace(0, 2 * np.pi, 2001)
        )
        assert found == pytest.approx(
            best / np.linalg.norm(first) / np.linalg.norm(second), abs=1e-4
        )

    def test_noise_gains_from_alignment_and_is_told(self):
        chance = chance_similarity(WIDTH, INPUTS, value_freedom(WIDTH))
        assert 0.2 < chance < 0.7
        assert chance > chance_similarity(WIDTH, INPUTS, key_freedom(WIDTH, "halves"))


class TestPooledShare:
    def test_equal_heads_keep_everything(self):
        assert pooled_share(head_products([draw()] * 4), 2) == pytest.approx(1)

    def test_opposite_heads_keep_nothing(self):
        assert pooled_share(head_products([draw(), -draw()]), 2) == pytest.approx(0, abs=1e-6)

    def test_it_is_the_norm_of_the_mean(self):
        heads = [draw(seed) for seed in range(4)]
        kept = sum(2 * np.linalg.norm((heads[i] + heads[i + 1]) / 2) ** 2 for i in (0, 2)) / sum(
            np.linalg.norm(head) ** 2 for head in heads
        )
        assert pooled_share(head_products(heads), 2) == pytest.approx(kept, 1e-5)

    def test_turned_heads_keep_everything_once_aligned(self):
        values = [rotation(seed) @ draw() for seed in range(4)]
        assert pooled_share(head_products(values), 4, value_freedom(WIDTH)) == pytest.approx(1)
        freedom = key_freedom(WIDTH, "halves")
        keys = [turned_in_planes(draw(), freedom.planes, seed) for seed in range(4)]
        assert pooled_share(head_products(keys), 4) < 0.8
        assert pooled_share(head_products(keys), 4, freedom) == pytest.approx(1)

    def test_alignment_never_keeps_less(self):
        heads = head_products([draw(seed) for seed in range(4)])
        for freedom in (key_freedom(WIDTH, "halves"), value_freedom(WIDTH)):
            assert pooled_share(heads, 4, freedom) > pooled_share(heads, 4)


class TestOfACheckpoint:
    def test_expanded_heads_are_alike_in_pairs(self, tmp_path):
        tensors = llama_tensors(dtype="F32", kv_heads=2)
        for layer in range(2):
            for part in "kv":
                name = f"model.layers.{layer}.self_attn.{part}_proj.weight"
                heads = tensors[name].reshape(2, 8, 32)
                tensors[name] = np.repeat(heads, 2, axis=0).reshape(32, 32)
        folder = write(tmp_path, tensors, kv_heads=4)
        found = head_similarity(folder)
        assert [layer.layer for layer in found.layers] == [0, 1]
        for layer in found.layers:
            for likeness in (layer.keys, layer.values):
                assert likeness.raw[0][1] == pytest.approx(1, abs=1e-5)
                assert likeness.raw[2][3] == pytest.approx(1, abs=1e-5)
                assert abs(likeness.raw[0][2]) < 0.3
                shares = {share.kv_heads: share for share in likeness.pooled}
                assert shares[2].raw == pytest.approx(1, abs=1e-5)
                assert shares[1].raw < shares[1].aligned < 0.95

    def test_layers_come_in_the_order_of_their_numbers(self, tmp_path):
        write_llama(tmp_path / "deep", layers=11)
        found = head_similarity(tmp_path / "deep")
        assert [layer.layer for layer in found.layers] == list(range(11))

    def test_one_head_has_nothing_to_be_compared_with(self, tmp_path):
        write_llama(tmp_path / "mqa", kv_heads=1)
        with pytest.raises(UsageError, match="single KV head"):
            head_similarity(tmp_path / "mqa")

    def test_weights_that_are_not_numbers_are_refused(self, tmp_path):
        tensors = llama_tensors(dtype="F32")
        tensors["model.layers.1.self_attn.v_proj.weight"][9, 3] = np.nan
        folder = write(tmp_path, tensors)
        with pytest.raises(CheckpointError, match="head 1 holds values that are not finite"):
            head_similarity(folder)

    def test_fused_heads_are_found_in_their_place(self, tmp_path):
        """A fused projection gives what its parts give."""
        import transformers

        config = transformers.Phi3Config(
            vocab_size=32, hidden_size=32, intermediate_size=24, num_hidden_layers=1,
            num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, bos_token_id=1,
            eos_token_id=2, max_position_embeddings=64,
        )  # fmt: skip
        model = transformers.Phi3ForCausalLM(config)
        model.save_pretrained(tmp_path / "fused")
        fused = model.model.layers[0].self_attn.qkv_proj.weight.detach().numpy()
        found = head_similarity(tmp_path / "fused").layers[0]
        for begin, likeness in ((32, found.keys), (48, found.values)):
            heads = [fused[begin : begin + 8], fused[begin + 8 : begin + 16]]
            expected = raw_similarity(head_products(heads))
            assert likeness.raw == pytest.approx(expected, abs=1e-5)

    def test_it_needs_no_torch(self):
        code = (
            "import sys; from gqaconvert.evaluation.head_similarity import head_similarity\n"
            "head_similarity('tiny'); print(sorted({'torch', 'transformers'} & set(sys.modules)))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stdout.strip() == "[]", done.stderr


def write(tmp_path: Path, tensors: dict[str, np.ndarray], kv_heads: int = 4) -> Path:
    import json

    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(llama_config(dtype="F32", kv_heads=kv_heads)))
    write_safetensors(folder / "model.safetensors", tensors)
    return folder
