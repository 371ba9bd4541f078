"""Makes gqaconvert/bundled/tasks/continuation.jsonl from the held-out part of the bundled text.

    python scripts/continuation_task.py

Questions are drawn with a fixed seed, but the text follows the Python version; so the file is kept
in the repository, and made again only on purpose.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from gqaconvert.bundled.text import bundled_documents

TARGET = Path(__file__).parent.parent / "gqaconvert/bundled/tasks/continuation.jsonl"
QUESTIONS = 200
CONTEXT_LINES = 8
CHOICE_LINES = 2
CHOICES = 4


def passages(text: str) -> list[tuple[str, str]]:
    """All pairs of a context and the lines that follow it, both with something to say."""
    lines = text.splitlines(keepends=True)
    found = []
    for begin in range(0, len(lines) - CONTEXT_LINES - CHOICE_LINES, CHOICE_LINES):
        middle = begin + CONTEXT_LINES
        context = "".join(lines[begin:middle])
        following = "".join(lines[middle : middle + CHOICE_LINES])
        if 150 <= len(context) <= 700 and 40 <= len(following.strip()) <= 160:
            found.append((context, following))
    return found


def main() -> None:
    chooser = random.Random(0)
    rows = []
    documents = [passages(document.text) for document in bundled_documents("heldout")]
    documents = [each for each in documents if len(each) >= 4 * CHOICES]
    while len(rows) < QUESTIONS:
        pairs = chooser.choice(documents)
        context, right = pairs.pop(chooser.randrange(len(pairs)))
        wrong = sorted({following for _, following in pairs} - {right})
        choices = [right, *chooser.sample(wrong, CHOICES - 1)]
        chooser.shuffle(choices)
        rows.append({"context": context, "choices": choices, "label": choices.index(right)})
        documents = [each for each in documents if len(each) >= 4 * CHOICES]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    TARGET.write_text(text, encoding="utf-8")
    print(f"{TARGET.name}: {len(rows)} questions, {len(text.encode()):,} bytes")


if __name__ == "__main__":
    main()
