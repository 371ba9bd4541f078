"""Rows of an estimate: known answers, formulas, notes and faults. No files, no weights."""

from __future__ import annotations

import json

import pytest

from gqaconvert.errors import CheckpointError, UnsupportedModelError, UsageError
from gqaconvert.kv_cache.element_types import storage_type
from gqaconvert.kv_cache.estimate import estimate_config
from gqaconvert.kv_cache.estimate_rows import activations
from gqaconvert.kv_cache.hardware import Accelerator, find_accelerator
from gqaconvert.kv_cache.lengths import Lengths
from gqaconvert.kv_cache.model_config import parse_config
from gqaconvert.kv_cache.question import Question, Reserve, parse_reserve, parse_tokens

GIB = 2**30
LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
    "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 32, "torch_dtype": "float16", "vocab_size": 32000,
}  # fmt: skip
PROMISED = {
    "kv_heads", "context", "batch", "kv_dtype", "tp", "kv_bytes_per_token", "kv_bytes",
    "weights_bytes", "total_bytes", "concurrent_requests", "decode_tokens_per_s_bound",
}  # fmt: skip


def config(**changes):
    return parse_config(LLAMA | changes, "config.json")


def rows(question=None, *, raw=None, **options):
    own = config() if raw is None else parse_config(raw, "config.json")
    return estimate_config(own, question or Question(), **options).rows


def notes(question=None, *, raw=None, **options):
    own = config() if raw is None else parse_config(raw, "config.json")
    return " / ".join(estimate_config(own, question or Question(), **options).notes)


class TestKnownAnswers:
    def test_16_gb_less_5_2_and_1_leave_8(self):
        card = Accelerator("card", "card", 16 * 10**9)
        question = Question(
            contexts=(2048,), kv_heads=(32,), gpu=card, activations_bytes=2 * 10**9,
            reserve=Reserve(10**9),
        )  # fmt: skip
        (row,) = rows(question, weights_bytes=5 * 10**9)
        assert row.left_for_kv_bytes == 8 * 10**9
        assert row.concurrent_requests == 8 * 10**9 // GIB == 7

    def test_two_terabytes_a_second(self):
        gpu = Accelerator("x", "x", 80 * GIB, bandwidth=2e12)
        (row,) = rows(Question(contexts=(2048,), kv_heads=(32,), gpu=gpu), weights_bytes=14 * 10**9)
        assert row.decode_tokens_per_s_bound_kv_only == pytest.approx(2e12 / GIB)
        assert row.decode_tokens_per_s_bound == pytest.approx(2e12 / (14e9 + GIB))

    def test_llama_2_7b_on_an_a100(self):
        question = Question(
            contexts=(4096, 32_768), kv_heads=(32, 4), gpu=find_accelerator("a100-80gb")
        )
        kv = {(row.kv_heads, row.context): row.kv_bytes for row in rows(question)}
        assert kv == {
            (32, 4096): 2 * GIB,
            (32, 32_768): 16 * GIB,
            (4, 4096): 268_435_456,
            (4, 32_768): 2 * GIB,
        }


class TestArithmetic:
    question = Question(
        contexts=(1000, 4096), batches=(1, 8), kv_heads=(32, 8), gpu=find_accelerator("h100-80gb"),
        kv_types=(storage_type("fp16"), storage_type("int4")),
    )  # fmt: skip

    def test_every_combination_has_a_row(self):
        assert len(rows(self.question)) == 2 * 2 * 2 * 2

    def test_rows_add_up(self):
        for row in rows(self.question):
            parts = row.weights_bytes + row.activations_bytes + row.kv_bytes + row.reserve_bytes
            assert row.total_bytes == parts
            assert row.fits == (row.total_bytes <= 80 * GIB)
            left = 80 * GIB - row.weights_bytes - row.activations_bytes - row.reserve_bytes
            assert row.left_for_kv_bytes == left
            assert row.concurrent_requests == left // (row.kv_bytes // row.batch)

    def test_pages_round_up(self):
        for row in rows(self.question):
            if row.context == 4096:
                assert row.concurrent_requests_paged == row.concurrent_requests
            else:
                assert row.concurrent_requests_paged < row.concurrent_requests

    def test_the_longest_context_uses_up_what_is_left(self):
        for row in rows(self.question):
            used = row.longest_context * row.kv_bytes_per_token * row.batch
            one_token = row.kv_bytes_per_token * row.batch
            assert 0 <= row.left_for_kv_bytes - used <= 2 * one_token

    def test_a_batch_shares_the_reading_of_the_weights(self):
        for row in rows(self.question):
            read = row.weights_bytes + row.kv_bytes
            assert row.decode_tokens_per_s_bound == pytest.approx(3350e9 / read)
            together = row.batch * row.decode_tokens_per_s_bound
            assert row.decode_tokens_per_s_bound_batch == pytest.approx(together)

    def test_activations_are_as_the_note_says(self):
        working = activations(config(), Question(), 4096, 8)
        assert working == 2048 * (4 * 4096 + 2 * 11008) * 2 + 8 * 32000 * 4
        assert activations(config(), Question(), 100, 1) < working / 10
        assert "4 × hidden + 2 × intermediate" in notes()

    def test_experts_make_activations_of_those_in_use_and_reading_too(self):
        raw = {"model_type": "mixtral", "torch_dtype": "bfloat16"}
        question = Question(contexts=(4096,), kv_heads=(8,), gpu=find_accelerator("h200"))
        (row,) = rows(question, raw=raw)
        expected = 2048 * (4 * 4096 + 2 * 2 * 14336) * 2 + 32000 * 4
        assert row.activations_bytes == expected
        assert row.decode_tokens_per_s_bound > 2 * 4800e9 / row.weights_bytes
        assert "28% of the weights" in notes(question, raw=raw)

    def test_mixed_lengths_come_with_every_row(self):
        question = Question(lengths=Lengths((100, 4000), "two"), gpu=find_accelerator("a100-80gb"))
        for row in rows(question):
            assert row.mixed.padded_bytes == 4000 * row.kv_bytes_per_token
            assert row.mixed.needed_bytes == 2050 * row.kv_bytes_per_token
            assert row.mixed.concurrent_requests < row.mixed.concurrent_requests_paged

    def test_json_has_what_was_promised_and_is_json(self):
        answer = estimate_config(config(), self.question).to_json()
        assert set(answer[0]) >= PROMISED | {"notes", "faults", "weights_from"}
        assert json.loads(json.dumps(answer)) == answer


class TestTensorParallelism:
    def test_bytes_are_those_on_each_gpu(self):
        one, eight = rows(Question(kv_heads=(32,), degrees=(1, 8)))
        assert eight.kv_bytes == one.kv_bytes // 8
        assert eight.weights_bytes == one.weights_bytes // 8
        assert (eight.kv_heads_per_gpu, eight.replicated) == (4, False)

    def test_one_head_saves_nothing_more_on_eight_gpus_than_eight_heads(self):
        eight, one = rows(Question(kv_heads=(8, 1), degrees=(8,)))
        assert one.kv_bytes == eight.kv_bytes
        assert (one.kv_heads_per_gpu, one.replicated, eight.replicated) == (1, True, False)
        said = notes(Question(kv_heads=(8, 1), degrees=(8,)))
        assert "1 on 8" in said
        assert "replicated" in said
        assert "8 on 8" not in said

    def test_query_heads_must_divide(self):
        with pytest.raises(UsageError, match="do not split evenly over 3"):
            rows(Question(degrees=(3,)))

    def test_a_latent_stays_whole(self):
        raw = {"model_type": "deepseek_v3"}
        one, eight = rows(Question(degrees=(1, 8)), raw=raw)
        assert one.kv_bytes == eight.kv_bytes


class TestQuestions:
    def test_what_is_left_open_is_filled_in(self):
        found = rows()
        assert {row.kv_heads for row in found} == {32, 8, 1}
        assert {row.context for row in found} == {4096}
        assert {row.kv_dtype for row in found} == {"fp16"}
        longer = rows(raw=LLAMA | {"max_position_embeddings": 32_768})
        assert {row.context for row in longer} == {4096, 32_768}

    @pytest.mark.parametrize("count", [5, 64, 0])
    def test_heads_that_do_not_divide_are_answered_with_those_that_do(self, count):
        with pytest.raises(UsageError) as error:
            rows(Question(kv_heads=(count,)))
        assert error.value.remedy == "--kv-heads 32, 16, 8, 4, 2, 1"

    def test_latent_attention_has_no_heads_to_choose(self):
        with pytest.raises(UsageError, match="one latent"):
            rows(Question(kv_heads=(1,)), raw={"model_type": "deepseek_v3"})

    @pytest.mark.parametrize(
        "wrong", [{"contexts": (0,)}, {"batches": (-1,)}, {"degrees": (0,)}, {"page": 0}]
    )
    def test_counts_must_be_positive(self, wrong):
        with pytest.raises(UsageError, match="not positive"):
            Question(**wrong)

    @pytest.mark.parametrize(
        ("text", "tokens"),
        [("4k", 4096), ("32K", 32_768), ("1m", 2**20), ("777", 777), ("0.5k", 512)],
    )
    def test_tokens(self, text, tokens):
        assert parse_tokens(text) == tokens

    @pytest.mark.parametrize("text", ["", "0", "4q", "-1", "1.5", "4 k k"])
    def test_no_tokens(self, text):
        with pytest.raises(UsageError):
            parse_tokens(text)

    def test_reserves(self):
        assert parse_reserve("10%").of(100) == 10
        assert parse_reserve("2GiB").of(100) == 2 * GIB
        assert parse_reserve("10%").of(None) == 0
        for wrong in ("100%", "much"):
            with pytest.raises(UsageError):
                parse_reserve(wrong)


class TestNotesAndFaults:
    @pytest.mark.parametrize(
        ("raw", "said"),
        [
            ({"model_type": "bamba"}, "weights not counted: the parameters of bamba"),
            ({"model_type": "bamba"}, "the state of constant size"),
            ({"model_type": "recurrent_gemma"}, "does not tell its size"),
            ({"model_type": "t5"}, "cross attention also keeps the encoder's"),
            ({"model_type": "gemma3n_text"}, "15 of 35 layers keep nothing"),
            ({"model_type": "gemma3n_text"}, "28 of 35 layers keep at most 512 tokens"),
            ({"model_type": "llama4_text"}, "keep at most 8,192 tokens"),
            ({"model_type": "deepseek_v3"}, "a latent of 512 and a rotary key of 64"),
            (
                {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 8},
                "transformers caches all 71 heads",
            ),
            (LLAMA | {"torch_dtype": None}, "no dtype; fp16 is assumed"),
            (LLAMA | {"quantization_config": {"quant_method": "awq"}}, "quantised (awq)"),
        ],
    )
    def test_what_a_reader_has_to_know(self, raw, said):
        if raw["model_type"] == "falcon":
            raw = raw | {"num_attention_heads": 64, "hidden_size": 4096}
            said = said.replace("71", "64")
        assert said in notes(raw=raw)

    def test_contexts_beyond_the_positions(self):
        assert "beyond the 4,096 positions" in notes(Question(contexts=(8192,)))
        assert "beyond" not in notes(Question(contexts=(4096,)))

    def test_a_class_without_kv_heads_is_pointed_to_inspect(self):
        raw = {"model_type": "gpt2"}
        assert {row.kv_heads for row in rows(raw=raw)} == {12}
        assert "inspect" in notes(Question(kv_heads=(1,)), raw=raw)

    def test_falcon_has_both_figures(self):
        raw = {
            "model_type": "falcon", "hidden_size": 8192, "new_decoder_architecture": True,
            "num_attention_heads": 128, "num_hidden_layers": 60, "num_kv_heads": 8,
        }  # fmt: skip
        row = rows(Question(kv_heads=(8,)), raw=raw)[0]
        assert row.kv_bytes_in_transformers == 16 * row.kv_bytes

    def test_a_config_that_cannot_be_right_is_told(self):
        answer = estimate_config(config(num_key_value_heads=5), Question())
        assert "32 attention heads cannot share 5" in answer.faults[0]
        assert answer.rows[0].kv_heads == 5

    def test_a_config_of_which_nothing_can_be_made_is_refused(self):
        with pytest.raises(CheckpointError, match="not positive"):
            estimate_config(config(num_key_value_heads=-1), Question())

    def test_compressed_caches_have_no_formula(self):
        with pytest.raises(UnsupportedModelError, match="fewer entries than tokens"):
            rows(raw={"model_type": "deepseek_v4"})

    def test_without_weights_the_cache_is_still_told(self):
        question = Question(gpu=find_accelerator("h200"))
        row = rows(question, raw={"model_type": "jamba"})[0]
        assert row.kv_bytes > 0
        assert row.weights_bytes is row.total_bytes is row.concurrent_requests is None
        assert row.decode_tokens_per_s_bound is None
        assert row.decode_tokens_per_s_bound_kv_only > 0
