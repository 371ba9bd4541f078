"""How far a model's predictions are from those of its source, token by token.

KL(source || model) in nats, and how often both think the same token likeliest. The source is
either in memory too, or was read once and its likeliest tokens saved to disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from gqaconvert.corpus.windows import Window, batches, fingerprint_windows
from gqaconvert.errors import UsageError
from gqaconvert.evaluation.results import Measurement, library_versions
from gqaconvert.evaluation.scoring import Reader
from gqaconvert.evaluation.window_means import WindowMean
from gqaconvert.modelling.models import LoadedModel

METRIC = "divergence"


class Source(Protocol):
    """What models are compared with.

    Attributes:
        name: of the model.
        weights_sha256: of the model.
        method: how exact the comparison is.
    """

    name: str
    weights_sha256: str
    method: str

    def compare(
        self, batch: Sequence[Window], logits: Iterator[torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield for each chunk of a model's logits KL, (C,), and whether the top token agrees."""
        ...


class LiveSource:
    """A source in memory: the divergence is exact, and every model costs a pass of the source.

    Args:
        loaded: the source.
        reader: of the same model, to use it again.
    """

    method = "exact"

    def __init__(self, loaded: LoadedModel, reader: Reader | None = None) -> None:
        self.name, self.weights_sha256 = loaded.name, loaded.weights_sha256
        self._reader = reader or Reader(loaded)

    def compare(
        self, batch: Sequence[Window], logits: Iterator[torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """See `Source.compare`."""
        for of_source, of_model in zip(self._reader.read(batch), logits, strict=True):
            check_vocabulary(of_source.shape[-1], of_model.shape[-1])
            p, q = of_source.log_softmax(-1), of_model.log_softmax(-1)
            # Adds up -inf - -inf where both rule a token out: such tokens weigh nothing.
            terms = torch.where(p.isneginf(), 0.0, p.exp() * (p - q))
            yield terms.sum(-1), of_source.argmax(-1) == of_model.argmax(-1)


def measure_divergence(
    loaded: LoadedModel,
    windows: Sequence[Window],
    source: Source,
    *,
    settings: Mapping[str, Any],
    batch_size: int = 1,
    reader: Reader | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Measurement:
    """Measure the divergence of a model from its source over the scored tokens of windows.

    Args:
        loaded: the model.
        windows: what both read; the caller has checked that their tokenizers agree.
        source: what to compare with.
        settings: recorded as they are.
        batch_size: windows read at once.
        reader: of the same model, to use it again.
        progress: called with tokens compared and tokens in all.

    Raises:
        UsageError: the two have vocabularies of different sizes.
    """
    reader = reader or Reader(loaded)
    kl, agreement = WindowMean(), WindowMean()
    values = []
    total = sum(window.num_scored for window in windows)
    for batch in batches(windows, batch_size):
        chunks = list(source.compare(batch, reader.read(batch)))
        sizes = [window.num_scored for window in batch]
        each_kl = torch.split(torch.cat([chunk for chunk, _ in chunks]).cpu().double(), sizes)
        each_top = torch.split(torch.cat([chunk for _, chunk in chunks]).cpu().double(), sizes)
        for of_window, top in zip(each_kl, each_top, strict=True):
            kl.add(float(of_window.sum()), len(of_window))
            agreement.add(float(top.sum()), len(top))
            values.append(of_window.float().numpy())
        if progress is not None:
            progress(kl.tokens, total)
    median, p99, largest = (float(each) for each in _percentiles(np.concatenate(values)))
    return Measurement(
        metric=METRIC,
        value=kl.mean,
        stderr=kl.stderr,
        n=len(windows),
        unit="nats",
        settings=dict(settings),
        versions=library_versions(),
        weights_sha256=loaded.weights_sha256,
        detail={
            "median": median,
            "p99": p99,
            "max": largest,
            "top1_agreement": agreement.mean,
            "top1_agreement_stderr": agreement.stderr,
            "tokens": kl.tokens,
            "method": source.method,
            "source": source.name,
            "windows_sha256": fingerprint_windows(windows),
        },
    )


def check_tokenizers(of_source: Any, of_model: Any, text: str, *, at: str) -> None:  # noqa: ANN401
    """Refuse to compare models that cut a text into other tokens.

    Args:
        of_source: tokenizer of the source.
        of_model: tokenizer of the model.
        text: to try them on.
        at: the model, for the error.

    Raises:
        UsageError: they differ.
    """
    cut = [tokenizer(text, verbose=False)["input_ids"] for tokenizer in (of_source, of_model)]
    if cut[0] != cut[1]:
        raise UsageError(
            "its tokenizer differs from that of the source; their predictions cannot be compared",
            at=at,
            remedy="models with one tokenizer, or evaluate each on its own",
        )


def check_vocabulary(of_source: int, of_model: int) -> None:
    """Refuse to compare distributions over different tokens.

    Raises:
        UsageError: the sizes differ.
    """
    if of_source != of_model:
        raise UsageError(
            f"the source predicts {of_source} tokens and the model {of_model}",
            remedy="a --baseline with the same tokenizer",
        )


def _percentiles(values: Any) -> Any:  # noqa: ANN401
    return np.percentile(values, (50, 99, 100))
