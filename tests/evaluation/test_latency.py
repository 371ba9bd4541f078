"""Timing one model: caches filled as promised, bytes as measured, memory watched."""

from __future__ import annotations

import pytest
import torch
import transformers

from gqaconvert.errors import UsageError
from gqaconvert.evaluation.bandwidth import measure_bandwidth
from gqaconvert.evaluation.cache_kinds import cache_kind
from gqaconvert.evaluation.latency import TimedModel, check_context
from gqaconvert.evaluation.machine import torch_threads, watched_memory
from gqaconvert.modelling.models import load_model


@pytest.fixture(scope="module")
def tiny():
    return load_model("tiny")


def timed(loaded, spec="dynamic", new_tokens=2):
    return TimedModel(loaded, cache_kind(spec), new_tokens)


class TestDecode:
    @pytest.mark.parametrize("batch", [1, 3])
    @pytest.mark.parametrize("fill", ["random", "prompt"])
    def test_the_cache_holds_the_context_before_the_first_step(self, tiny, batch, fill):
        decode = timed(tiny).decode(40, batch, fill)
        # 2 × 4 layers × 8 heads × 32 × 2 bytes
        assert decode.cache_bytes == 4096 * 40 * batch
        assert decode.fill == fill
        assert decode.seconds_per_token > 0

    def test_a_random_fill_leaves_the_model_where_a_prompt_would(self, tiny):
        """Shapes, types and positions of a filled cache are those of one that read a prompt."""
        bench = timed(tiny)
        with torch.inference_mode():
            filled, _ = bench._filled(30, 2, "random")
            read, _ = bench._filled(30, 2, "prompt")
        assert filled.get_seq_length() == read.get_seq_length() == 30
        for one, other in zip(filled.layers, read.layers, strict=True):
            assert one.keys.shape == other.keys.shape
            assert one.values.dtype == other.values.dtype
            assert not torch.equal(one.keys, other.keys)

    @pytest.mark.parametrize(
        "spec", ["static", "quantised:int4", "sliding:16", "sinks:4+12", "h2o:16", "snapkv:16"]
    )
    def test_every_kind_can_be_timed(self, tiny, spec):
        decode = timed(tiny, spec).decode(300, 1)
        assert decode.seconds_per_token > 0
        if spec not in ("static", "snapkv:16"):
            assert decode.cache_bytes < 4096 * 300 * 0.75

    def test_kinds_that_watch_attention_read_a_prompt(self, tiny):
        assert timed(tiny, "h2o:16").decode(40, 1).fill == "prompt"
        assert timed(tiny, "h2o:16").reads_prompt("random")
        assert not timed(tiny, "sliding:16").reads_prompt("random")

    def test_a_model_with_states_and_attention_is_filled(self, tmp_path):
        """Hybrid: only some layers keep keys and values."""
        config = transformers.Qwen3NextConfig(
            vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=2,
            num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16,
            linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8,
            linear_value_head_dim=8, layer_types=["linear_attention", "full_attention"],
        )  # fmt: skip
        model = transformers.Qwen3NextForCausalLM(config).eval()
        loaded = load_model("tiny")
        loaded.model, loaded.name = model, "hybrid"
        bench = timed(loaded)
        with torch.inference_mode():
            cache, fill = bench._filled(50, 1, "random")
        assert fill == "random"
        assert cache.layers[1].keys.shape == (1, 2, 50, 16)
        assert bench.decode(50, 1).seconds_per_token > 0


class TestPrefill:
    def test_it_takes_longer_for_more_tokens(self, tiny):
        bench = timed(tiny)
        bench.prefill(8, 1)
        short = min(bench.prefill(8, 1).seconds for _ in range(3))
        long = min(bench.prefill(512, 1).seconds for _ in range(3))
        assert long > 2 * short

    def test_it_reads_the_whole_prompt(self, tiny, monkeypatch):
        seen = []
        monkeypatch.setattr(
            TimedModel, "_step", lambda self, ids, cache: seen.append(tuple(ids.shape)) or ids
        )
        timed(tiny).prefill(24, 3)
        assert seen == [(3, 24)]


class TestContext:
    def test_beyond_what_it_was_made_for_is_told(self, tiny):
        assert check_context(tiny, 1024) is None
        assert "made for 1,024 tokens" in check_context(tiny, 1025)

    def test_learned_positions_end(self, tiny):
        config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=32)
        tiny_gpt2 = load_model("tiny")
        tiny_gpt2.model = transformers.GPT2LMHeadModel(config)
        assert check_context(tiny_gpt2, 32) is None
        with pytest.raises(UsageError, match="learned positions for 32 tokens"):
            check_context(tiny_gpt2, 33)


class TestMachine:
    def test_the_peak_is_that_of_the_block_alone(self):
        size = 300 * 2**20
        with watched_memory("cpu") as calm:
            pass
        with watched_memory("cpu") as busy:
            block = bytearray(size)
            del block
        with watched_memory("cpu") as after:
            pass
        assert busy.peak_bytes - calm.peak_bytes > 0.9 * size
        assert after.peak_bytes < busy.peak_bytes - 0.5 * size

    def test_threads_are_set_back(self):
        before = torch.get_num_threads()
        with torch_threads(before + 1):
            assert torch.get_num_threads() == before + 1
        assert torch.get_num_threads() == before

    def test_bandwidth_is_that_of_a_real_machine(self):
        found = measure_bandwidth(buffer_bytes=2**24, runs=2)
        assert found.buffer_bytes == 2**24
        for value in (found.read, found.copy, found.triad):
            assert 1e8 < value < 1e13
        assert found.bytes_per_s == max(found.read, found.copy, found.triad)
