"""Text to measure on: every way to name it, and what is refused."""

from __future__ import annotations

import json

import pytest

from gqaconvert.bundled.text import bundled_documents
from gqaconvert.corpus.text import load_text, make_text
from gqaconvert.errors import UsageError


def test_bundled_text_is_the_held_out_split():
    text = load_text("bundled")
    assert list(text.documents) == [each.text for each in bundled_documents("heldout")]
    assert text.size_bytes == len(text.text.encode())


@pytest.mark.parametrize("suffix", [".txt", ".md"])
def test_plain_file_is_one_document(tmp_path, suffix):
    path = tmp_path / f"story{suffix}"
    path.write_text("One.\n\nTwo: naïve — done.\n", encoding="utf-8")
    text = load_text(str(path))
    assert text.documents == ("One.\n\nTwo: naïve — done.\n",)
    assert text.name == f"story{suffix}"
    assert text.size_bytes == path.stat().st_size


def test_jsonl_gives_a_document_a_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"text": "first", "id": 1}, {"text": "  "}, {"text": "second\u2028line"}]
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n")
    assert load_text(str(path)).text == "first\n\nsecond\u2028line"


def test_parquet_gives_a_document_a_row(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    parquet.write_table(arrow.table({"text": ["first", None, "second"], "n": [1, 2, 3]}), path)
    assert load_text(str(path)).documents == ("first", "second")
    parquet.write_table(arrow.table({"body": ["first"]}), path)
    with pytest.raises(UsageError, match="no column 'text' among body"):
        load_text(str(path))


def test_dataset_is_read_from_its_test_split(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "corpus"
    folder.mkdir()
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text(json.dumps({"text": f"of {split}"}) + "\n")
    assert load_text(f"dataset:{folder}").text == "of test"
    assert load_text(f"dataset:{folder}:default:train").text == "of train"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "empty"),
        ("a.txt", b"\xff\xfe\x00", "not UTF-8"),
        ("a.jsonl", b'{"text": "x"}\n{"txt": "x"}\n', "no string called 'text'"),
        ("a.jsonl", b'{"text": "x"}\n{"text"', "not JSON"),
        ("a.parquet", b"PAR", "not a parquet file"),
    ],
)
def test_bad_files_are_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message) as refusal:
        load_text(str(tmp_path / name))
    if name.endswith("jsonl"):
        assert "line 2" in str(refusal.value)


def test_missing_text_says_what_can_be_given():
    with pytest.raises(UsageError, match="no such text") as refusal:
        load_text("nowhere.txt")
    assert "dataset:" in str(refusal.value.remedy)


def test_hash_tells_texts_apart():
    assert make_text("a", ["x"]).sha256 == make_text("b", ["x"]).sha256
    assert make_text("a", ["x"]).sha256 != make_text("a", ["y"]).sha256
