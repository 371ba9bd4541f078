"""Writes output files: shares or copies byte ranges of a source, and writes computed bytes.

A range is first offered to the file system to share (XFS, Btrfs). Else its whole blocks go around
the page cache (O_DIRECT): the pages of a large copy would only push each other out, which took four
times as long where it was measured, and the bytes are on the device when the write returns. What is
left, and file systems that can do neither, take the ordinary path.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
import threading
from pathlib import Path

from gqaconvert.checkpoint.shards import BLOCK_BYTES
from gqaconvert.errors import CheckpointError

Buffer = bytes | bytearray | memoryview

_FICLONERANGE = 0x4020940D  # linux/fs.h: _IOW(0x94, 13, struct file_clone_range)
_BUFFER_BYTES = 4 << 20
_SMALLEST_DIRECT_BYTES = 1 << 20
_NOT_POSSIBLE = frozenset(
    {
        errno.EXDEV,
        errno.ENOSYS,
        errno.EOPNOTSUPP,
        errno.EINVAL,
        errno.ENOTTY,
        errno.EPERM,
        errno.EBADF,
    }
)

_thread = threading.local()


class OutputFile:
    """One file in the making, written at any position from several threads.

    Args:
        path: where; an existing file is gone on with.
        size_bytes: its final size.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        self._path = path
        self._plain = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.ftruncate(self._plain, size_bytes)
        self._direct = _open_direct(path)
        self._can_share = True

    def close(self) -> None:
        """Close the descriptors."""
        os.close(self._plain)
        if self._direct is not None:
            os.close(self._direct)

    def copy(self, source: int, begin: int, end: int, position: int) -> None:
        """Take bytes `begin` to `end` of the descriptor `source` to `position`.

        Raises:
            CheckpointError: the source ended early.
            OSError: as the system reports it, a full disk for one.
        """
        first, last = _whole_blocks(position, position + end - begin)
        if first >= last:
            _copy_plainly(source, begin, end, self._plain, position)
            return
        # File systems share whole blocks only, so the ends, which lie within blocks, are copied
        # apart.
        shift = begin - position
        _copy_plainly(source, begin, first + shift, self._plain, position)
        if not self._share(source, first + shift, last + shift, first):
            self._copy_directly(source, first + shift, last + shift, first)
        _copy_plainly(source, last + shift, end, self._plain, last)

    def write(self, content: Buffer, position: int) -> None:
        """Write all of `content` at `position`."""
        view = memoryview(content).cast("B")
        first, last = _whole_blocks(position, position + len(view))
        if self._direct is None or last - first < _SMALLEST_DIRECT_BYTES:
            _write_plainly(self._plain, view, position)
            return
        _write_plainly(self._plain, view[: first - position], position)
        buffer = _aligned_buffer()
        for at in range(first, last, _BUFFER_BYTES):
            part = view[at - position : min(at + _BUFFER_BYTES, last) - position]
            buffer[: len(part)] = part
            self._write_blocks(buffer[: len(part)], at)
        _write_plainly(self._plain, view[last - position :], last)

    def _share(self, source: int, begin: int, end: int, position: int) -> bool:
        if not self._can_share or begin % BLOCK_BYTES:
            return False
        wanted = struct.pack("=qQQQ", source, begin, end - begin, position)
        try:
            fcntl.ioctl(self._plain, _FICLONERANGE, wanted)
        except OSError as error:
            if error.errno not in _NOT_POSSIBLE:
                raise
            self._can_share = False
            return False
        return True

    def _copy_directly(self, source: int, begin: int, end: int, position: int) -> None:
        if self._direct is None or end - begin < _SMALLEST_DIRECT_BYTES:
            _copy_plainly(source, begin, end, self._plain, position)
            return
        buffer = _aligned_buffer()
        while begin < end:
            count = os.preadv(source, [buffer[: min(_BUFFER_BYTES, end - begin)]], begin)
            whole = count - count % BLOCK_BYTES
            if whole == 0:
                _copy_plainly(source, begin, end, self._plain, position)
                return
            self._write_blocks(buffer[:whole], position)
            begin += whole
            position += whole

    def _write_blocks(self, view: memoryview, position: int) -> None:
        written = 0
        if self._direct is not None:
            try:
                written = os.pwrite(self._direct, view, position)
            except OSError as error:
                # Some file systems take the flag when opening and refuse the write.
                if error.errno not in _NOT_POSSIBLE:
                    raise
        _write_plainly(self._plain, view[written:], position + written)


def _open_direct(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except (OSError, AttributeError):  # a file system, or a system, without it
        return None


def _whole_blocks(begin: int, end: int) -> tuple[int, int]:
    return begin + -begin % BLOCK_BYTES, end - end % BLOCK_BYTES


def _aligned_buffer() -> memoryview:
    """A buffer of this thread that begins on a page, as direct writes need."""
    if not hasattr(_thread, "buffer"):
        _thread.buffer = memoryview(mmap.mmap(-1, _BUFFER_BYTES))
    buffer: memoryview = _thread.buffer
    return buffer


def _write_plainly(target: int, view: memoryview, position: int) -> None:
    while view:
        written = os.pwrite(target, view, position)
        view = view[written:]
        position += written


def _copy_plainly(source: int, begin: int, end: int, target: int, position: int) -> None:
    """Copy inside the kernel, or through memory where it cannot."""
    while begin < end:
        try:
            copied = os.copy_file_range(source, target, end - begin, begin, position)
        except OSError as error:
            if error.errno not in _NOT_POSSIBLE:
                raise
            content = os.pread(source, min(_BUFFER_BYTES, end - begin), begin)
            _write_plainly(target, memoryview(content), position)
            copied = len(content)
        if copied == 0:
            raise CheckpointError("source file ended early; it changed while being read")
        begin += copied
        position += copied
