"""The files beside the weights: which are copied, which rewritten, and which would be stale."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gqaconvert.checkpoint.index import SAFETENSORS_INDEX, TORCH_INDEX
from gqaconvert.checkpoint.staging import MANIFEST
from gqaconvert.checkpoint.tensors import CheckpointIndex
from gqaconvert.errors import CheckpointError

CONFIG = "config.json"
CARD = "README.md"

_WRITTEN_BY_US = frozenset({CONFIG, CARD, MANIFEST, SAFETENSORS_INDEX})
_WEIGHTS = frozenset(
    {
        ".safetensors",
        ".bin",
        ".pt",
        ".pth",
        ".ckpt",
        ".h5",
        ".msgpack",
        ".gguf",
        ".onnx",
        ".onnx_data",
        ".ot",
        ".npz",
    }
)
_FOLDERS_WITH_OTHER_WEIGHTS = frozenset({"original", "onnx", "openvino", "coreml", "gguf"})
_NOT_PART_OF_THE_MODEL = frozenset({".git", ".cache", "__pycache__", ".ipynb_checkpoints"})


@dataclass(frozen=True, slots=True)
class Sidecars:
    """What happens to the files beside the weights.

    Attributes:
        copied: paths inside the folder, copied byte for byte.
        left_out: path → why it is not copied.
    """

    copied: tuple[str, ...]
    left_out: Mapping[str, str]

    def size_bytes(self, folder: Path) -> int:
        """Bytes of the copied files."""
        return sum((folder / name).stat().st_size for name in self.copied)


def find_sidecars(folder: Path, index: CheckpointIndex) -> Sidecars:
    """Sort the files of a checkpoint folder that are not its weights.

    Files in other weight formats, and folders of them, would still hold the unconverted model and
    are left out.
    """
    weights = {file.name for file in index.files}
    copied, left_out = [], {}
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        name = relative.as_posix()
        if _NOT_PART_OF_THE_MODEL & set(relative.parts) or not path.is_file() or name in weights:
            continue
        if _FOLDERS_WITH_OTHER_WEIGHTS & set(relative.parts[:-1]):
            left_out[name] = (
                f"in {relative.parts[0]}/, where other formats keep the unconverted weights"
            )
        elif name in _WRITTEN_BY_US:
            continue
        elif relative.name == TORCH_INDEX or _is_weight(relative):
            left_out[name] = "holds unconverted weights; rebuild it from the output"
        else:
            copied.append(name)
    return Sidecars(tuple(copied), left_out)


def copy_sidecars(sidecars: Sidecars, folder: Path, target: Path) -> None:
    """Copy the files byte for byte; links are followed, since a Hub cache holds nothing else."""
    for name in sidecars.copied:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / name, target / name)


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        CheckpointError: missing, or not a JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"not readable: {error}", at=str(path)) from error
    if not isinstance(content, dict):
        raise CheckpointError("not a JSON object", at=str(path))
    return content


def edit_config(text: str, changes: Iterable[tuple[tuple[str, ...], Any]]) -> str:
    """Change keys of a config.json, keeping the order of keys, the indentation and the ending.

    Args:
        text: the source's config.json.
        changes: path of a key → its new value; a missing section is created at the end.
    """
    config = json.loads(text)
    for path, value in changes:
        section = config
        for key in path[:-1]:
            section = section.setdefault(key, {})
        section[path[-1]] = value
    written = json.dumps(config, indent=_indentation(text), ensure_ascii=text.isascii())
    return written + text[len(text.rstrip()) :]


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON as transformers does: two spaces, a newline at the end."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _is_weight(relative: Path) -> bool:
    # training_args.bin is settings, but a pickle of the source's training all the same.
    return relative.suffix in _WEIGHTS or relative.name.endswith(".safetensors.index.json")


def _indentation(text: str) -> int | str | None:
    lines = text.splitlines()
    if len(lines) < 2:
        return None
    leading = lines[1][: len(lines[1]) - len(lines[1].lstrip())]
    return "\t" if leading.startswith("\t") else len(leading) or None
