"""Tokenizer files that an equivalent class needs beside those of the source.

transformers picks a tokenizer class by model class. For GPT-BigCode and Nemotron it takes one
that reads tokenizer.json alone and knows no special tokens of its own, where GPT-2, OPT and
GPT-NeoX build theirs from vocab.json and merges.txt.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from gqaconvert.checkpoint.sidecars import read_json_object

TOKENIZER = "tokenizer.json"
SPECIAL_TOKENS = "special_tokens_map.json"

_SETTINGS = "tokenizer_config.json"
_READ_TOKENIZER_JSON_ALONE = frozenset({"GPTBigCodeForCausalLM", "NemotronForCausalLM"})


@dataclass(frozen=True, slots=True)
class AddedFiles:
    """Files to write beside the copied ones.

    Attributes:
        content: name → text; none replaces a file of the source.
        notices: what the reader should know.
    """

    content: dict[str, str] = field(default_factory=dict)
    notices: tuple[str, ...] = ()


def lacking_tokenizer_files(folder: Path, becomes: str | None) -> AddedFiles:
    """Return what the tokenizer of a checkpoint that becomes another class lacks.

    Imports transformers only where something is lacking.

    Args:
        folder: the source.
        becomes: the equivalent class, if any.
    """
    if becomes not in _READ_TOKENIZER_JSON_ALONE:
        return AddedFiles()
    has_json = (folder / TOKENIZER).is_file()
    if not has_json and not (folder / "vocab.json").is_file():
        return AddedFiles()
    needs_tokens = _leaves_special_tokens_out(folder)
    if has_json and not needs_tokens:
        return AddedFiles()
    from transformers import AutoTokenizer  # takes seconds

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # the tokenizers library raises no narrower class
        found = str(error).strip().splitlines()[:1]
        return AddedFiles(
            notices=(f"the tokenizer cannot be read, and is copied as it is: {found}",)
        )
    content = {}
    if not has_json:
        content[TOKENIZER] = tokenizer.backend_tokenizer.to_str(pretty=True)
    if needs_tokens:
        content[SPECIAL_TOKENS] = json.dumps(tokenizer.special_tokens_map, indent=2) + "\n"
    names = " and ".join(content)
    return AddedFiles(content, (f"added for the tokenizer of {becomes}: {names}",))


def _leaves_special_tokens_out(folder: Path) -> bool:
    if (folder / SPECIAL_TOKENS).is_file():
        return False
    settings = folder / _SETTINGS
    return not settings.is_file() or "eos_token" not in read_json_object(settings)
