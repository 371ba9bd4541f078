"""The stream: one global order of sequences, whatever the processes, threads and interruptions."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from itertools import islice
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from letter_tokenizer import BEGIN, END, letters, make_letters

from gqaconvert.errors import RefusedError, UsageError
from gqaconvert.settings.uptrain import DataSettings
from gqaconvert.training.stream import open_batches

LETTERS = make_letters()
ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def _write(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def _text(number, size):
    return (f"{number}:" + ALPHABET * (size // 26 + 1))[:size]


def _data(*paths, **changes):
    datasets = [{"path": path} if isinstance(path, str) else path for path in paths]
    values = {"context": 8, "workers": 0, "shuffle_buffer": 1024, **changes}
    return DataSettings.model_validate({"datasets": datasets, **values})


def _steps(data, count, *, batch, tokenizer=LETTERS, micro=1, processes=1, cursor=None):
    """Run some steps on each process; return the tokens by number and the cursor at the end."""
    found, ends = {}, []
    for index in range(processes):
        with open_batches(
            data,
            tokenizer,
            batch_sequences=batch,
            micro_batch=micro,
            process_index=index,
            num_processes=processes,
            cursor=cursor,
        ) as batches:
            own = batch // processes
            for _ in range(count):
                step = list(islice(batches, -(-own // micro)))
                assert [len(each.token_ids) for each in step[:-1]] == [micro] * (len(step) - 1)
                assert sum(len(each.token_ids) for each in step) == own
                for each in step:
                    rows = zip(each.sequence_numbers.tolist(), each.token_ids.tolist(), strict=True)
                    for number, row in rows:
                        assert number not in found
                        assert number % processes == index
                        found[number] = row
            ends.append(step[-1].cursor)
    assert all(end == ends[0] for end in ends)
    return found, json.loads(json.dumps(ends[0]))


FEW = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(any)


@FEW
@given(SIZES, st.integers(2, 16), st.integers(1, 4))
def test_order_kept_is_that_of_the_files_again_and_again(tmp_path, sizes, context, micro):
    texts = [_text(number, size) for number, size in enumerate(sizes)]
    data = _data(_write(tmp_path / "a.jsonl", texts), context=context, shuffle_buffer=1)
    found, _ = _steps(data, 2, batch=6, micro=micro)
    once = [token for text in texts if text for token in (BEGIN, *letters(text), END)]
    whole = (once * (12 * context // len(once) + 1))[: 12 * context]
    assert [token for number in range(12) for token in found[number]] == whole


@FEW
@given(
    SIZES,
    SIZES,
    st.integers(2, 16),
    st.lists(
        st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 3, 4]), st.integers(1, 5)),
        min_size=1,
        max_size=4,
    ),
)
def test_any_processes_and_interruptions_give_the_same_sequences(
    tmp_path, first, second, context, sittings
):
    one = _write(tmp_path / "a.jsonl", [_text(n, size) for n, size in enumerate(first)])
    two = _write(tmp_path / "b.jsonl", [_text(n + 50, size) for n, size in enumerate(second)])
    data = _data(one, {"path": two, "weight": 2.0}, context=context)
    steps = sum(count for count, _, _ in sittings)
    whole, end = _steps(data, steps, batch=12)
    found, cursor = {}, None
    for count, processes, micro in sittings:
        more, cursor = _steps(
            data, count, batch=12, micro=micro, processes=processes, cursor=cursor
        )
        assert not set(more) & set(found)
        found |= more
    assert found == whole
    assert sorted(found) == list(range(12 * steps))
    assert cursor == end


def test_batch_of_another_size_goes_on_at_the_next_sequence(tmp_path):
    data = _data(_write(tmp_path / "a.jsonl", [_text(n, 5 * n) for n in range(9)]))
    whole, _ = _steps(data, 9, batch=3)
    start, cursor = _steps(data, 1, batch=3)
    rest, _ = _steps(data, 3, batch=8, micro=3, processes=2, cursor=cursor)
    assert start | rest == whole


def test_each_epoch_holds_each_document_once_in_another_order(tmp_path):
    texts = [chr(ord("a") + number) * 6 for number in range(20)]
    data = _data(_write(tmp_path / "a.jsonl", texts))
    found, _ = _steps(data, 3, batch=20)  # <s>, six letters, </s>: a document a sequence
    epochs = [[tuple(found[n]) for n in range(at, at + 20)] for at in (0, 20, 40)]
    assert all(len(set(epoch)) == 20 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    again, _ = _steps(data, 3, batch=20)
    other, _ = _steps(data.model_copy(update={"seed": 1}), 3, batch=20)
    assert again == found
    assert other != found


def test_threads_give_what_none_give(tmp_path):
    data = _data(_write(tmp_path / "a.jsonl", [_text(n, 7 * n % 50) for n in range(200)]))
    plain, end = _steps(data, 20, batch=8)
    for workers in (1, 3):
        ahead = data.model_copy(update={"workers": workers})
        found, cursor = _steps(ahead, 20, batch=8, micro=3)
        assert found == plain
        assert cursor == end
        assert _steps(ahead, 2, batch=8, cursor=end)[0] == _steps(data, 2, batch=8, cursor=end)[0]


def test_cursor_is_that_of_the_last_step_completed(tmp_path):
    data = _data(_write(tmp_path / "a.jsonl", [_text(n, 30) for n in range(9)]))
    with open_batches(data, LETTERS, batch_sequences=6, micro_batch=2) as batches:
        cursors = [batch.cursor["sequences"] for batch in islice(batches, 6)]
    assert cursors == [0, 0, 6, 6, 6, 12]
    start = next(open_batches(data, LETTERS, batch_sequences=6, micro_batch=2)).cursor
    assert _steps(data, 2, batch=6, cursor=start) == _steps(data, 2, batch=6)


def test_large_file_is_taken_up_in_its_middle(tmp_path, monkeypatch):
    monkeypatch.setattr("gqaconvert.training.documents.PIECE_BYTES", 64)
    (tmp_path / "large.txt").write_text("".join(f"line {n}\n" for n in range(100)))
    (tmp_path / "small.txt").write_text("small")
    data = _data(str(tmp_path), shuffle_buffer=1)
    whole, _ = _steps(data, 40, batch=4)
    tokens = [token for number in sorted(whole) for token in whole[number]]
    text = (tmp_path / "large.txt").read_text()
    expected = [BEGIN, *letters(text), END, BEGIN, *letters("small"), END, BEGIN, *letters(text)]
    assert tokens == expected[: len(tokens)]
    cursor, found = None, {}
    for _ in range(40):
        more, cursor = _steps(data, 1, batch=4, cursor=cursor)
        found |= more
    assert found == whole


@pytest.mark.parametrize("shuffle_buffer", [1, 3, 1000])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_streamed_data_set_is_taken_up_exactly(tmp_path, monkeypatch, shuffle_buffer, kind):
    monkeypatch.setattr("gqaconvert.training.streamed._SMALLEST_BLOCK", 4)
    texts = [_text(number, 20) for number in range(10)]
    for part in range(3):
        rows = texts[part * 4 : part * 4 + 4]
        if kind == "jsonl":
            _write(tmp_path / f"{part}.jsonl", rows)
        else:
            import pyarrow
            from pyarrow import parquet

            parquet.write_table(pyarrow.table({"text": rows}), tmp_path / f"{part}.parquet")
    other = tmp_path.with_name(f"{tmp_path.name}-other")
    other.mkdir()
    path = f"dataset:{tmp_path}::train" if kind == "jsonl" else str(tmp_path)
    data = _data(
        {"path": path, "streaming": True},
        {"path": _write(other / "a.jsonl", ["other " * 9] * 5), "weight": 0.3},
        context=22,
        shuffle_buffer=shuffle_buffer,
    )
    whole, _ = _steps(data, 15, batch=2)
    cursor, found = None, {}
    for processes in [1, 2] * 5 + [1] * 5:
        more, cursor = _steps(data, 1, batch=2, processes=processes, cursor=cursor)
        found |= more
    assert found == whole
    alone = _data({"path": path, "streaming": True}, context=22, shuffle_buffer=shuffle_buffer)
    rows, _ = _steps(alone, 3, batch=10)  # a document a sequence: three epochs
    decoded = [LETTERS.decode(rows[number][1:-1]) for number in range(30)]
    epochs = [decoded[at : at + 10] for at in (0, 10, 20)]
    assert all(sorted(epoch) == sorted(texts) for epoch in epochs)
    if shuffle_buffer == 1:
        assert epochs == [texts] * 3
    else:
        assert len({tuple(epoch) for epoch in epochs}) == 3


def test_blocks_of_a_stream_are_shuffled_each_in_its_own_way(tmp_path):
    _write(tmp_path / "a.jsonl", [chr(ord("!") + number) * 6 for number in range(40)])
    data = _data({"path": f"dataset:{tmp_path}::train", "streaming": True}, shuffle_buffer=8)
    found, _ = _steps(data, 1, batch=40)  # a document a sequence
    numbers = [ord(LETTERS.decode(found[number])[3]) - ord("!") for number in range(40)]
    blocks = [numbers[at : at + 8] for at in range(0, 40, 8)]
    assert [sorted(block) for block in blocks] == [
        list(range(at, at + 8)) for at in range(0, 40, 8)
    ]
    assert len({tuple(number % 8 for number in block) for block in blocks}) > 1


def test_chats_and_texts_are_mixed(tmp_path):
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = make_letters(chat_template=template)
    chat = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes."}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    chats = {
        "path": str(tmp_path / "chats.jsonl"),
        "messages": "messages",
        "loss_on": "replies",
    }
    data = _data(chats, _write(tmp_path / "a.jsonl", ["plain"]), separate_documents=True)
    with open_batches(data, tokenizer, batch_sequences=40, micro_batch=40) as batches:
        batch = next(batches)
    counted = tokenizer.decode(batch.token_ids[batch.counted])
    assert "Yes" in counted
    assert "plai" in counted
    assert "Hi?" not in counted
    assert "Hi?" in tokenizer.decode(batch.token_ids.flatten())
    starts = batch.token_ids[:, 1:][batch.position_ids[:, 1:] == 0]
    assert set(starts.tolist()) == {BEGIN, tokenizer.convert_tokens_to_ids("<|im_start|>")}
    with pytest.raises(UsageError, match="no chat template"):
        open_batches(data, LETTERS, batch_sequences=1, micro_batch=1)


def test_tokenizer_without_special_tokens_adds_none(tmp_path):
    data = _data(_write(tmp_path / "a.jsonl", ["abc"]), context=4)
    plain = make_letters(begin=False, end=False)
    assert _steps(data, 1, batch=1, tokenizer=plain)[0] == {0: letters("abca")}


def test_half_a_character_is_replaced(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "ab\\ud83dcd"}\n')
    found, _ = _steps(_data(str(tmp_path)), 1, batch=1)
    assert found[0] == [BEGIN, *letters("ab?cd"), END, BEGIN]


@pytest.mark.parametrize("workers", [0, 2])
def test_source_of_empty_documents_is_refused(tmp_path, workers):
    empty = _write(tmp_path / "empty.jsonl", ["", "  \n"])
    full = _write(tmp_path / "full.jsonl", ["abc"])
    with pytest.raises(UsageError, match="all documents are empty") as refusal:
        _steps(_data(full, empty, workers=workers), 50, batch=2)
    assert refusal.value.at == empty


@pytest.mark.parametrize("workers", [0, 2])
def test_error_inside_a_document_reaches_the_reader_with_its_place(tmp_path, workers):
    path = tmp_path / "a.jsonl"
    path.write_text("".join('{"text": "some words"}\n' for _ in range(40)) + '{"txt": 1}\n')
    data = _data(str(path), workers=workers, shuffle_buffer=1)
    with open_batches(data, LETTERS, batch_sequences=4, micro_batch=4) as batches:
        for _ in range(2):
            with pytest.raises(UsageError, match="no string called 'text'") as refusal:
                for _ in batches:
                    pass
            assert "line 41" in str(refusal.value.at)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": 4}, "context was 8 and is 4"),
        ({"seed": 3}, "seed was 0 and is 3"),
        ({"separate_documents": True}, "separate_documents was False and is True"),
        ({"datasets": ({"path": "A", "weight": 2.0},)}, r"datasets\[0\] differs"),
        ({"datasets": ({"path": "A"}, {"path": "B"})}, r"datasets\[1\] is new"),
        ({"datasets": ({"path": "B"},)}, r"datasets\[0\] differs"),
    ],
)
def test_cursor_of_other_data_is_refused(tmp_path, change, message):
    first, second = _write(tmp_path / "a.jsonl", ["abcdef"]), _write(tmp_path / "b.jsonl", ["xy"])
    _, cursor = _steps(_data(first), 1, batch=1)
    if "datasets" in change:
        change["datasets"] = [
            {**each, "path": {"A": first, "B": second}[each["path"]]} for each in change["datasets"]
        ]
    other = DataSettings.model_validate({**_data(first).model_dump(), **change})
    with pytest.raises(RefusedError, match=message):
        _steps(other, 1, batch=1, cursor=cursor)


def test_cursor_of_another_tokenizer_or_version_is_refused(tmp_path):
    data = _data(_write(tmp_path / "a.jsonl", ["abcdef"]))
    _, cursor = _steps(data, 1, batch=1)
    with pytest.raises(RefusedError, match="tokenizer differs"):
        _steps(data, 1, batch=1, cursor=cursor, tokenizer=make_letters(begin=False))
    with pytest.raises(RefusedError, match="another version"):
        _steps(data, 1, batch=1, cursor={**cursor, "version": 0})


def test_cursor_is_small_and_survives_a_move_and_other_threads(tmp_path):
    (tmp_path / "here").mkdir()
    data = _data(_write(tmp_path / "here" / "a.jsonl", [_text(n, 30) for n in range(9)]))
    whole, _ = _steps(data, 4, batch=2)
    _, cursor = _steps(data, 2, batch=2)
    assert len(json.dumps(cursor)) < 500
    moved = Path(tmp_path / "here").rename(tmp_path / "there")
    later = _data(str(moved / "a.jsonl"), workers=2)
    rest, _ = _steps(later, 2, batch=2, cursor=cursor)
    assert rest == {number: whole[number] for number in range(4, 8)}


def test_processes_that_cannot_share_evenly_are_refused():
    with pytest.raises(UsageError, match="6 sequences a step cannot be shared by 4") as refusal:
        open_batches(_data("bundled"), LETTERS, batch_sequences=6, micro_batch=1, num_processes=4)
    assert "32 tokens" in str(refusal.value.remedy)


def test_wait_is_measured_and_reading_ahead_shortens_it(tmp_path):
    path = _write(tmp_path / "a.jsonl", [ALPHABET * 400 for _ in range(4)])
    waits = {}
    for workers in (0, 1):
        data = _data(path, workers=workers, context=1024)
        with open_batches(data, LETTERS, batch_sequences=8, micro_batch=8) as batches:
            next(batches)
            started = batches.wait_seconds
            for _ in range(10):
                time.sleep(0.1)
                next(batches)
            waits[workers] = batches.wait_seconds - started
    assert waits[0] > 0.02
    assert waits[1] < 0.8 * waits[0]


def test_closing_ends_the_threads(tmp_path):
    data = _data(_write(tmp_path / "a.jsonl", [_text(n, 30) for n in range(90)]), workers=2)
    before = set(threading.enumerate())
    with open_batches(data, LETTERS, batch_sequences=2, micro_batch=2) as batches:
        next(batches)
        assert set(threading.enumerate()) - before
    assert set(threading.enumerate()) == before
    with pytest.raises(StopIteration):
        next(batches)
    forgotten = open_batches(data, LETTERS, batch_sequences=2, micro_batch=2)
    next(forgotten)
    del forgotten
    assert set(threading.enumerate()) == before


SCRIPT = """
import sys
from letter_tokenizer import make_letters
from gqaconvert.settings.uptrain import DataSettings
from gqaconvert.training.stream import open_batches
datasets = [{"path": sys.argv[1]}]
data = DataSettings.model_validate({"datasets": datasets, "context": 8, "workers": 2})
batches = open_batches(data, make_letters(), batch_sequences=2, micro_batch=2)
next(batches)
print("reading", flush=True)
if sys.argv[2] == "leave":
    sys.exit(0)
for batch in batches:
    pass
"""


@pytest.mark.parametrize("ending", ["kill", "leave"])
def test_no_process_is_left_behind(tmp_path, ending):
    path = _write(tmp_path / "a.jsonl", [_text(n, 30) for n in range(90)])
    tests = Path(__file__).parent.parent
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, path, ending], stdout=subprocess.PIPE, cwd=tests, text=True
    ) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "reading\n"
        if ending == "kill":
            seen = psutil.Process(reader.pid)
            assert seen.num_threads() > 1
            assert seen.children(recursive=True) == []
            reader.kill()
        assert reader.wait(20) == (-signal.SIGKILL if ending == "kill" else 0)
