"""Byte ranges arrive whole at any alignment, by every route a file system may offer or refuse."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gqaconvert.checkpoint import copying
from gqaconvert.checkpoint.copying import OutputFile
from gqaconvert.errors import CheckpointError

SIZE = 9 << 20
CONTENT = os.urandom(SIZE)

ROUTES = [
    "as the file system offers",
    "no direct writes",
    "refused direct writes",
    "no kernel copy",
]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("copying") / "source"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture(params=ROUTES)
def route(request, monkeypatch):
    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, "planted")

    if request.param == "no direct writes":
        monkeypatch.setattr(copying, "_open_direct", lambda _: None)
    elif request.param == "refused direct writes":
        monkeypatch.setattr(
            copying, "_open_direct", lambda path: os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        )
    elif request.param == "no kernel copy":
        monkeypatch.setattr(copying, "_open_direct", lambda _: None)
        monkeypatch.setattr(os, "copy_file_range", refuse)
    return request.param


def places(size: int) -> st.SearchStrategy[int]:
    edges = [0, 1, 511, 512, 4095, 4096, 4097, 1 << 20, (1 << 20) + 4096, (4 << 20) + 8, size]
    return st.one_of(st.sampled_from([e for e in edges if e <= size]), st.integers(0, size))


@given(data=st.data())
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_a_range_arrives_whole_and_touches_nothing_else(source, tmp_path, route, data):
    begin, end = sorted((data.draw(places(SIZE)), data.draw(places(SIZE))))
    position = data.draw(places(SIZE))
    total = position + end - begin + 5000
    path = tmp_path / "output"
    path.write_bytes(b"\xaa" * total)
    output = OutputFile(path, total)
    descriptor = os.open(source, os.O_RDONLY)
    try:
        output.copy(descriptor, begin, end, position)
    finally:
        os.close(descriptor)
        output.close()
    written = path.read_bytes()
    assert written[position : position + end - begin] == CONTENT[begin:end]
    assert set(written[:position]) <= {0xAA}
    assert written[position + end - begin :] == b"\xaa" * 5000


@given(position=places(SIZE), length=places(SIZE))
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_computed_bytes_arrive_whole(tmp_path, route, position, length):
    path = tmp_path / "output"
    path.unlink(missing_ok=True)
    output = OutputFile(path, position + length + 10)
    output.write(CONTENT[:length], position)
    output.close()
    written = path.read_bytes()
    assert written == bytes(position) + CONTENT[:length] + bytes(10)


def test_a_source_that_ends_early_is_an_error(source, tmp_path, route):
    output = OutputFile(tmp_path / "output", 2 * SIZE)
    descriptor = os.open(source, os.O_RDONLY)
    try:
        with pytest.raises(CheckpointError, match="ended early"):
            output.copy(descriptor, 0, SIZE + 1, 0)
    finally:
        os.close(descriptor)
        output.close()


def test_an_error_of_the_device_is_not_swallowed(source, tmp_path, monkeypatch):
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    output = OutputFile(tmp_path / "output", SIZE)
    monkeypatch.setattr(os, "pwrite", full)
    monkeypatch.setattr(os, "copy_file_range", full)
    with pytest.raises(OSError, match="No space left"):
        output.write(CONTENT, 0)
    descriptor = os.open(source, os.O_RDONLY)
    with pytest.raises(OSError, match="No space left"):
        output.copy(descriptor, 0, SIZE, 0)
    os.close(descriptor)
    output.close()


@pytest.fixture
def sharing_device(tmp_path: Path):
    """A loop-mounted XFS, which shares extents, where we may mount one."""
    image, mount = tmp_path / "image", tmp_path / "mount"
    with image.open("wb") as stream:
        stream.truncate(400 << 20)
    mount.mkdir()
    for command in (
        ["mkfs.xfs", "-q", str(image)],
        ["mount", "-o", "loop", str(image), str(mount)],
    ):
        try:
            made = subprocess.run(command, capture_output=True, check=False)
        except FileNotFoundError:
            pytest.skip("no mkfs.xfs here")
        if made.returncode:
            pytest.skip("mounting an XFS image needs privileges")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def test_blocks_are_shared_where_the_file_system_can(sharing_device):
    source, path = sharing_device / "source", sharing_device / "output"
    source.write_bytes(CONTENT * 8)
    os.sync()
    free = os.statvfs(sharing_device).f_bfree
    output = OutputFile(path, 8 * SIZE + 4096)
    descriptor = os.open(source, os.O_RDONLY)
    output.copy(descriptor, 100, 8 * SIZE, 4096 + 100)
    os.close(descriptor)
    output.close()
    os.sync()
    assert path.read_bytes()[4196:] == (CONTENT * 8)[100:]
    used = (free - os.statvfs(sharing_device).f_bfree) * os.statvfs(sharing_device).f_bsize
    assert used < SIZE, "blocks were copied, not shared"
