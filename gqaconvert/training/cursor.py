"""Where a run stands in its data, as plain JSON, and of which data that was.

It says which document comes next and how many of its tokens are done; tokens themselves are not
kept. A cursor of other data, settings or another tokenizer is refused: it would point elsewhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from gqaconvert.corpus.windows import leading_tokens
from gqaconvert.errors import RefusedError
from gqaconvert.settings.uptrain import DataSettings
from gqaconvert.training.mixture import Mixture

VERSION = 1

_PROBE = "Naïve façades — 1,234.5 of them,\n\tdef f(x): return x  # 終わり 😀"


def identify(settings: DataSettings, mixture: Mixture, tokenizer: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return what the order of tokens depends on, each part by its name.

    Local files are known by name and size wherever they lie.
    """
    parts: dict[str, Any] = {
        name: getattr(settings, name)
        for name in ("context", "separate_documents", "shuffle_buffer", "seed")
    }
    for number, (dataset, source) in enumerate(
        zip(settings.datasets, mixture.sources, strict=True)
    ):
        chosen = dataset.model_dump(mode="json", exclude={"path"})
        parts[f"datasets[{number}]"] = _digest([chosen, source.identity()])
    parts["tokenizer"] = _digest(
        [
            sorted(tokenizer.get_vocab().items()),
            leading_tokens(tokenizer),
            tokenizer.eos_token_id,
            list(tokenizer(_PROBE, add_special_tokens=False)["input_ids"]),
            tokenizer.chat_template if any(each.messages for each in settings.datasets) else None,
        ]
    )
    return parts


def make_cursor(identity: Mapping[str, Any], sequences: int, place: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """Return the cursor after a number of sequences."""
    return {"version": VERSION, "data": dict(identity), "sequences": sequences, "place": place}


def check_cursor(cursor: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Refuse a cursor of other data.

    Raises:
        RefusedError: it is of another form, or of data that differs; the message says in what.
    """
    if cursor.get("version") != VERSION or not {"data", "sequences", "place"} <= set(cursor):
        raise RefusedError(
            "the place in the data was saved by another version",
            remedy="start the run again in another folder",
        )
    saved = cursor["data"]
    names = dict.fromkeys([*saved, *identity])
    differs = [name for name in names if saved.get(name) != identity.get(name)]
    if differs:
        raise RefusedError(
            "the run was begun with other data: "
            + ", ".join(_describe(name, saved.get(name), identity.get(name)) for name in differs),
            remedy="the settings, files and tokenizer of before, or another folder",
        )


def _describe(name: str, saved: object, now: object) -> str:
    if isinstance(saved, str) or isinstance(now, str):  # digests say nothing to a reader
        state = "is new" if saved is None else "is gone" if now is None else "differs"
        return f"{name} {state}"
    return f"{name} was {saved} and is {now}"


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
