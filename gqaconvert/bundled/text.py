"""Text that every Python has: the topics of its language reference and its standard library.

Training, calibration and evaluation on the bundled model use it, so that a demonstration downloads
nothing. What is held out is fixed by name; the text itself follows the Python version, so whoever
publishes a figure records `fingerprint`.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Split = Literal["train", "heldout"]

HELDOUT_TOPICS = frozenset({"calls", "formatstrings", "import", "string-methods", "typesmapping"})
"""Topics of the language reference kept for evaluation; no other topic quotes them whole."""

HELDOUT_MODULES = frozenset(
    {
        "bisect",
        "calendar",
        "fractions",
        "graphlib",
        "heapq",
        "queue",
        "sched",
        "shlex",
        "statistics",
        "textwrap",
    }
)
"""Standard library modules kept for evaluation."""

PACKAGES = (
    "asyncio", "collections", "concurrent", "ctypes", "curses", "dbm", "email", "html", "http",
    "importlib", "json", "logging", "multiprocessing", "re", "sqlite3", "tomllib", "unittest",
    "urllib", "venv", "wsgiref", "xml", "xmlrpc", "zoneinfo",
)  # fmt: skip
"""Packages read beside the top-level modules; data tables and test suites are left out."""

_TEST_FOLDERS = frozenset({"test", "tests"})
_LARGEST_FILE_BYTES = 150_000


@dataclass(frozen=True)
class Document:
    """One piece of text and the name that chooses it: `topic:NAME` or `module:dotted.name`."""

    name: str
    text: str


def bundled_documents(split: Split) -> list[Document]:
    """Return the documents of one split, in a fixed order.

    Args:
        split: "train", or "heldout" for the topics and modules named in this file.

    Raises:
        FileNotFoundError: this Python was installed without its library sources or reference
            topics.
    """
    wanted = split == "heldout"
    topics = [
        Document(f"topic:{name}", text)
        for name, text in sorted(_topics().items())
        if (name in HELDOUT_TOPICS) == wanted
    ]
    modules = [
        Document(f"module:{name}", path.read_text(encoding="utf-8"))
        for name, path in sorted(_modules().items())
        if (name in HELDOUT_MODULES) == wanted
    ]
    return topics + modules


def fingerprint(documents: list[Document]) -> str:
    """SHA-256 of the names and texts, to record beside a figure measured on them."""
    digest = hashlib.sha256()
    for document in documents:
        for part in (document.name, document.text):
            encoded = part.encode()
            digest.update(len(encoded).to_bytes(8, "little"))
            digest.update(encoded)
    return digest.hexdigest()


def _topics() -> dict[str, str]:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise FileNotFoundError(
            "this Python lacks pydoc_data.topics, part of the standard library"
        ) from error
    return dict(topics)


def _modules() -> dict[str, Path]:
    """Dotted name → source file of every library module that is neither test nor data table."""
    library = Path(sysconfig.get_path("stdlib"))
    files = list(library.glob("*.py"))
    for package in PACKAGES:
        files += (library / package).rglob("*.py")
    found = {}
    for path in files:
        relative = path.relative_to(library)
        if _TEST_FOLDERS & set(relative.parts) or relative.name.startswith("_sysconfigdata"):
            continue
        if 0 < path.stat().st_size <= _LARGEST_FILE_BYTES:
            parts = relative.with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    if not found:
        raise FileNotFoundError(f"no standard library sources in {library}")
    return found
