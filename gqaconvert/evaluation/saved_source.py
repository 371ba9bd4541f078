"""The source's likeliest tokens, saved to disk once, to compare any number of models with it.

Of each scored token the k largest log-probabilities are kept; the rest of the vocabulary is lumped
into one remainder. The divergence measured so is a lower bound of the exact one (the log-sum
inequality): what the two models disagree about *within* the remainder goes unseen, and it weighs at
most as much as the source's remainder, whose mean is recorded in `method`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gqaconvert.corpus.windows import Window, batches, fingerprint_windows
from gqaconvert.evaluation.divergence import check_vocabulary
from gqaconvert.evaluation.scoring import Reader
from gqaconvert.modelling.models import LoadedModel, ModelFolder

_ABOUT = "about.json"
_SMALLEST_REMAINDER = 1e-12


class SavedSource:
    """Reads what `save_source` wrote; windows must be asked for in the order they were saved in.

    Args:
        folder: from `save_source`.
    """

    def __init__(self, folder: Path) -> None:
        about = _read_about(folder)
        self.name, self.weights_sha256 = about["name"], about["weights_sha256"]
        self.method = f"top {about['k']}, remainder {about['remainder']:.3g}"
        self._vocabulary: int = about["vocabulary"]
        # Mapped, so that memory does not grow with the text.
        self._tokens = np.load(folder / "tokens.npy", mmap_mode="r")
        self._log_probs = np.load(folder / "log_probs.npy", mmap_mode="r")
        self._place = 0

    def compare(
        self,
        batch: Sequence[Window],
        logits: Iterator[torch.Tensor],
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """See `divergence.Source.compare`."""
        for of_model in logits:
            check_vocabulary(self._vocabulary, of_model.shape[-1])
            rows = slice(self._place, self._place + len(of_model))
            self._place = rows.stop
            top = torch.from_numpy(np.array(self._tokens[rows], np.int64)).to(of_model.device)
            p = torch.from_numpy(np.array(self._log_probs[rows])).to(of_model.device)
            q = of_model.log_softmax(-1).gather(-1, top)
            rest_p, rest_q = _remainder(p), _remainder(q)
            within = (p.exp() * (p - q)).sum(-1)
            yield within + rest_p * (rest_p / rest_q).log(), top[:, 0] == of_model.argmax(-1)


def source_identity(
    source: ModelFolder, windows: Sequence[Window], k: int, placement: Mapping[str, Any]
) -> dict[str, Any]:
    """What saved predictions depend on.

    Args:
        source: the model.
        windows: what it reads.
        k: tokens to keep of each position.
        placement: how it is loaded: type, device, attention.
    """
    return {
        "name": source.name,
        "weights_sha256": source.weights_sha256,
        "windows_sha256": fingerprint_windows(windows),
        "k": k,
        **placement,
    }


def open_saved(folder: Path, identity: Mapping[str, Any]) -> SavedSource | None:
    """Return predictions saved before, None where there are none or they are of another source."""
    if not (folder / _ABOUT).exists():
        return None
    about = _read_about(folder)
    same = all(about.get(key) == value for key, value in identity.items())
    return SavedSource(folder) if same else None


def save_source(
    loaded: LoadedModel,
    windows: Sequence[Window],
    folder: Path,
    identity: Mapping[str, Any],
    *,
    batch_size: int = 1,
    reader: Reader | None = None,
) -> SavedSource:
    """Write the likeliest tokens of every scored position.

    Args:
        loaded: the source.
        windows: what to read.
        folder: where to; 8 × k bytes a scored token.
        identity: from `source_identity`, k included.
        batch_size: windows read at once.
        reader: of the same model, to use it again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _ABOUT).unlink(missing_ok=True)
    reader = reader or Reader(loaded)
    vocabulary = reader.vocabulary
    shape = (sum(window.num_scored for window in windows), min(identity["k"], vocabulary))
    tokens = np.lib.format.open_memmap(folder / "tokens.npy", "w+", np.int32, shape)
    log_probs = np.lib.format.open_memmap(folder / "log_probs.npy", "w+", np.float32, shape)
    place, remainder = 0, 0.0
    for batch in batches(windows, batch_size):
        for logits in reader.read(batch):
            found = logits.log_softmax(-1).topk(shape[1], dim=-1)
            rows = slice(place, place + len(logits))
            tokens[rows] = _likeliest_first(found.indices, logits.argmax(-1)).cpu().numpy()
            log_probs[rows] = found.values.cpu().numpy()
            remainder += float(_remainder(found.values).sum())
            place = rows.stop
    tokens.flush()
    log_probs.flush()
    # Last, so that a stopped run never looks finished.
    about = {**identity, "vocabulary": vocabulary, "remainder": remainder / shape[0]}
    (folder / _ABOUT).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    return SavedSource(folder)


def _likeliest_first(top: torch.Tensor, likeliest: torch.Tensor) -> torch.Tensor:
    """Put what argmax chose first: among equals, common in bfloat16, topk may choose otherwise."""
    elsewhere = top == likeliest[:, None]
    top = torch.where(elsewhere, top[:, :1], top)
    return torch.cat([likeliest[:, None], top[:, 1:]], dim=1)


def _remainder(log_probs: torch.Tensor) -> torch.Tensor:
    return (1 - log_probs.exp().sum(-1)).clamp_min(_SMALLEST_REMAINDER)


def _read_about(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
    return content
