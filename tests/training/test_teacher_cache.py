"""A cache is what the teacher said, appears when it is whole, and is refused if it does not fit."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from zoo import build

from gqaconvert.errors import CheckpointError, GqaconvertError, RefusedError, UsageError
from gqaconvert.training.batch import Batch
from gqaconvert.training.teacher import Teacher
from gqaconvert.training.teacher_cache import TeacherCache, write_teacher_cache
from gqaconvert.training.teacher_cache_files import bytes_needed, cache_exists

CONTEXT, TOP_K = 9, 5
IDENTITY = {"teacher": "abc", "data": {"seed": 1}}
SEQUENCE_BYTES = bytes_needed(1, CONTEXT, TOP_K)


@pytest.fixture(scope="module")
def teacher():
    return Teacher(build("llama"))


def sequences(count, rows=2, context=CONTEXT):
    token_ids = torch.randint(7, 90, (count, context), generator=torch.Generator().manual_seed(0))
    counted = torch.ones_like(token_ids, dtype=torch.bool)
    for begin in range(0, count, rows):
        numbers = torch.arange(begin, min(begin + rows, count))
        yield Batch(token_ids[numbers], counted[numbers], None, numbers, {})


def write(folder, teacher, count=7, batches=None, **options):
    given = sequences(count) if batches is None else batches
    options = {"shard_bytes": 3 * SEQUENCE_BYTES, **options}
    return write_teacher_cache(folder, teacher, given, count, TOP_K, IDENTITY, **options)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_it_holds_what_the_teacher_says(tmp_path, teacher, temperature):
    cache = write(tmp_path / "cache", teacher, temperature=temperature)
    assert (cache.num_sequences, cache.context, cache.top_k) == (7, CONTEXT, TOP_K)
    assert (cache.temperature, cache.vocabulary) == (temperature, 96)
    token_ids = torch.cat([batch.token_ids for batch in sequences(7)])
    with torch.no_grad():
        logits = teacher.model(input_ids=token_ids, use_cache=False).logits / temperature
    expected = logits.log_softmax(-1).topk(TOP_K, dim=-1)
    numbers = torch.tensor([6, 0, 3])  # of three shards, the last a short one
    indices, log_probs, rest = TeacherCache(tmp_path / "cache", IDENTITY).read(numbers)
    assert (indices.dtype, log_probs.dtype) == (torch.int32, torch.float16)
    assert torch.equal(indices.long(), expected.indices[numbers])
    torch.testing.assert_close(log_probs.float(), expected.values[numbers], rtol=1e-3, atol=1e-3)
    total = log_probs.float().exp().sum(-1) + rest.float().exp()
    torch.testing.assert_close(total, torch.ones(3, CONTEXT), rtol=2e-3, atol=0)


def test_batches_of_any_size_and_more_than_needed_give_the_same(tmp_path, teacher):
    one = write(tmp_path / "one", teacher)
    other = write(tmp_path / "other", teacher, batches=sequences(40, rows=4))
    numbers = torch.arange(7)
    assert torch.equal(one.read(numbers)[0], other.read(numbers)[0])
    torch.testing.assert_close(one.read(numbers)[1], other.read(numbers)[1], rtol=2e-3, atol=0)


def test_its_size_is_what_was_announced(tmp_path, teacher):
    write(tmp_path / "cache", teacher)
    on_disk = sum(np.load(path).nbytes for path in (tmp_path / "cache").glob("*.npy"))
    assert on_disk == bytes_needed(7, CONTEXT, TOP_K) == 7 * CONTEXT * (TOP_K * 6 + 2)


def test_an_interrupted_run_looks_unfinished_and_is_gone_on_with(tmp_path, teacher):
    folder = tmp_path / "cache"
    runs = []
    hook = teacher.module.register_forward_hook(lambda *_: runs.append(1))

    def stop(done, total):
        assert total == 7
        if done >= 4:  # the first shard is whole, the second has begun
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(folder, teacher, progress=stop)
    assert not folder.exists()
    assert not cache_exists(folder)
    with pytest.raises(UsageError, match="no teacher's cache"):
        TeacherCache(folder)
    assert len(runs) == 2
    runs.clear()
    found = write(folder, teacher)
    assert len(runs) == 3  # all but sequences 0 and 1; 2 comes in one batch with 3
    hook.remove()
    expected = write(tmp_path / "at once", teacher)
    for mine, theirs in zip(
        found.read(torch.arange(7)), expected.read(torch.arange(7)), strict=True
    ):
        assert torch.equal(mine, theirs)


def test_an_unfinished_one_of_something_else_is_refused(tmp_path, teacher):
    def stop(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "cache", teacher, progress=stop)
    with pytest.raises(RefusedError, match="cannot be written"):
        write(tmp_path / "cache", teacher, temperature=3.0)


def test_a_finished_one_is_not_written_over(tmp_path, teacher):
    write(tmp_path / "cache", teacher)
    with pytest.raises(RefusedError, match="there already"):
        write(tmp_path / "cache", teacher)


def test_one_made_of_something_else_is_refused_and_told_apart(tmp_path, teacher):
    write(tmp_path / "cache", teacher)
    with pytest.raises(RefusedError, match="teacher: abc there, xyz here") as refused:
        TeacherCache(tmp_path / "cache", {**IDENTITY, "teacher": "xyz"})
    assert "data" not in str(refused.value.what)
    with pytest.raises(RefusedError, match="tokenizer: None there"):
        TeacherCache(tmp_path / "cache", {**IDENTITY, "tokenizer": 1})
    TeacherCache(tmp_path / "cache")


@pytest.mark.parametrize("number", [7, 100, -1])
def test_a_sequence_beyond_the_end_is_a_clear_error(tmp_path, teacher, number):
    cache = write(tmp_path / "cache", teacher)
    with pytest.raises(UsageError, match=f"sequence {number} is not in .* holds 7"):
        cache.read(torch.tensor([0, number]))


def test_sequences_that_end_early_leave_nothing(tmp_path, teacher):
    with pytest.raises(GqaconvertError, match="end before number 9"):
        write(tmp_path / "cache", teacher, count=9, batches=sequences(7))
    with pytest.raises(GqaconvertError, match="end before number 1"):
        write(tmp_path / "cache", teacher, count=1, batches=[])
    assert list(tmp_path.iterdir()) == []


def test_sequences_out_of_order_or_of_another_length_are_refused(tmp_path, teacher):
    first, second, *_ = sequences(7)
    with pytest.raises(GqaconvertError, match=r"sequence 2 .* comes where sequence 0"):
        write(tmp_path / "cache", teacher, batches=[second, first])
    with pytest.raises(GqaconvertError, match="of 8 tokens comes where sequence 2 of 9"):
        write(tmp_path / "cache", teacher, batches=[first, list(sequences(7, context=8))[1]])


def test_a_vocabulary_smaller_than_k_is_kept_whole(tmp_path, teacher):
    cache = write_teacher_cache(tmp_path / "cache", teacher, sequences(2), 2, 1000, IDENTITY)
    assert cache.top_k == 96
    _, log_probs, rest = cache.read(torch.arange(2))
    assert float(rest.max()) < -1000
    torch.testing.assert_close(
        log_probs.float().exp().sum(-1), torch.ones(2, CONTEXT), rtol=2e-3, atol=0
    )


def test_a_damaged_cache_is_told(tmp_path, teacher):
    folder = tmp_path / "cache"
    write(folder, teacher)
    path = folder / "tokens-00001.npy"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match="damaged"):
        TeacherCache(folder).read(torch.tensor([3]))
    TeacherCache(folder).read(torch.tensor([2]))  # of another shard
    np.save(path, np.zeros((3, CONTEXT, TOP_K - 1), np.int32))
    with pytest.raises(CheckpointError, match="not int32"):
        TeacherCache(folder).read(torch.tensor([3]))
    about = folder / "gqaconvert.json"
    about.write_text("{")
    with pytest.raises(CheckpointError, match="not a teacher's cache"):
        TeacherCache(folder)
    about.write_text(json.dumps({"teacher_cache": {"version": 99}}))
    with pytest.raises(RefusedError, match="version 99"):
        TeacherCache(folder)


def test_too_little_space_is_refused_before_anything_is_run(tmp_path, teacher):
    runs = []
    hook = teacher.module.register_forward_hook(lambda *_: runs.append(1))
    with pytest.raises(RefusedError, match=r"only .* are free"):
        write_teacher_cache(tmp_path / "cache", teacher, sequences(2), 10**15, TOP_K, IDENTITY)
    hook.remove()
    assert not runs
