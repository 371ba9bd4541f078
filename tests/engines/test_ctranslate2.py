"""CTranslate2 reads converted checkpoints and continues as transformers does."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def engine(install):
    return install("ctranslate2", "ctranslate2>=4.8", "torch", "transformers>=5.24")


def test_the_same_greedy_tokens(case, engine, tmp_path):
    engine.run(
        "ct2-transformers-converter", "--model", str(case.folder), "--output_dir",
        str(tmp_path / "model"), HF_HUB_OFFLINE="1",
    )  # fmt: skip
    answer = engine.answer("generate_ctranslate2.py", case.question(tmp_path / "model"))
    assert answer["ids"] == case.expected
