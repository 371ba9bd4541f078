"""Runs an iterator in a thread, a few items ahead of who reads them, and measures the wait."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True)
class _Ended:
    """The last thing a thread says: that nothing follows, or what went wrong."""

    error: BaseException | None


class Ahead(Iterator[Item], Generic[Item]):
    """An iterator whose items are made ahead.

    Args:
        items: made in another thread from now on, so nobody else may read it.
        depth: items made ahead at most; 0 to make each when it is asked for, in no thread.

    Attributes:
        wait_seconds: how long the reader waited, in all.
    """

    def __init__(self, items: Iterator[Item], depth: int) -> None:
        self.wait_seconds = 0.0
        self._items = items
        self._ended: _Ended | None = None
        self._ready: queue.Queue[Item | _Ended] | None = None
        if not depth:
            self._stop: Callable[[], object] = weakref.finalize(self, _close, items)
        else:
            ready: queue.Queue[Item | _Ended] = queue.Queue(depth)
            stopped = threading.Event()
            # A daemon, so that a reader that dies with an error does not wait for it.
            thread = threading.Thread(
                target=_make, args=(items, ready, stopped), name="data", daemon=True
            )
            thread.start()
            self._ready = ready
            self._stop = weakref.finalize(self, _halt, thread, ready, stopped)

    def __next__(self) -> Item:
        if self._ended is None:
            begin = time.perf_counter()
            found = self._make_one() if self._ready is None else self._ready.get()
            self.wait_seconds += time.perf_counter() - begin
            if not isinstance(found, _Ended):
                return found
            self._ended = found
        if self._ended.error is not None:
            raise self._ended.error
        raise StopIteration

    def close(self) -> None:
        """Stop; no item is given afterwards. May be called again."""
        self._ended = self._ended or _Ended(None)
        self._stop()

    def _make_one(self) -> Item | _Ended:
        try:
            return next(self._items)
        except StopIteration:
            return _Ended(None)
        except Exception as error:
            return _Ended(error)


def _make(
    items: Iterator[Item], ready: queue.Queue[Item | _Ended], stopped: threading.Event
) -> None:
    ended = _Ended(None)
    try:
        for item in items:
            ready.put(item)
            if stopped.is_set():
                break
    except BaseException as error:  # whatever it is, the reader must not wait for ever
        ended = _Ended(error)
    finally:
        _close(items)
    if not stopped.is_set():
        ready.put(ended)


def _halt(
    thread: threading.Thread, ready: queue.Queue[Item | _Ended], stopped: threading.Event
) -> None:
    stopped.set()
    while thread.is_alive():
        try:  # make room: the thread may be waiting for some
            ready.get_nowait()
        except queue.Empty:
            if thread is threading.current_thread():  # the last reference was dropped there
                return
            thread.join(0.02)


def _close(items: Iterator[object]) -> None:
    close = getattr(items, "close", None)
    if close is not None:
        close()
