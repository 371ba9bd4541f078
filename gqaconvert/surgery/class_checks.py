"""What only the model class can tell: does a checkpoint load whole, does it generate right?

Imports torch and transformers, which takes seconds; level 1 of verification does without.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from gqaconvert.errors import VerificationError
from gqaconvert.modelling.classes import FORWARD_THROUGH, model_class, quiet_transformers
from gqaconvert.surgery.verify import Check

_PROMPT_TOKENS = 24
_CACHED_STEPS = 8
_TOLERANCE = {torch.float32: 2e-3, torch.float64: 1e-6}
_ROUNDED_TOLERANCE = 0.15
"""Largest difference between cached and uncached logits, in standard deviations of the logits."""


def check_class(folder: Path, source: Path | None) -> Check:
    """Build the class on the meta device and match it with the files, without reading weights.

    Keys that the source lacks or has in surplus as well are its own affair and do not count.

    Raises:
        VerificationError: something is missing, unexpected or of another shape.
    """
    model, found = _load_on_meta(folder)
    known = _load_on_meta(source)[1] if source is not None else {}
    for kind in ("mismatched_keys", "missing_keys", "unexpected_keys"):
        faults = _names(found[kind]) - _names(known.get(kind, set()))
        if faults:
            raise VerificationError(
                f"{type(model).__name__} finds {len(faults)} {kind.replace('_', ' ')},"
                f" such as {min(faults)!r}",
                at=str(folder),
            )
    return Check("class", f"{type(model).__name__} takes every tensor, and misses none")


def check_forward(folder: Path, cached_heads: int) -> list[Check]:
    """Load the model; check its logits, cached against uncached ones, and the shape of its cache.

    Args:
        folder: a checkpoint.
        cached_heads: KV heads that its cache must hold.

    Raises:
        VerificationError: whichever does not hold.
    """
    with quiet_transformers():
        # Eager attention, which every class has, and which in some is right where sdpa is not.
        model: Any = model_class(folder).from_pretrained(
            folder, dtype=_dtype_that_fits(folder), attn_implementation="eager"
        )
        model = getattr(model, FORWARD_THROUGH.get(type(model).__name__, ""), model).eval()
        prompt = _prompt(model.config)
        with torch.inference_mode():
            logits = model(input_ids=prompt, use_cache=False).logits.double()
        if not bool(logits.isfinite().all()):
            raise VerificationError("logits are not finite", at=str(folder))
        cached, cache = _decode(model, prompt, use_cache=True)
        uncached, _ = _decode(model, prompt, use_cache=False)
    spread = _difference(cached, uncached) / float(logits.std())
    if spread > _TOLERANCE.get(model.dtype, _ROUNDED_TOLERANCE):
        raise VerificationError(
            f"generation with the cache differs from that without by {spread:.2g} standard"
            " deviations of the logits",
            at=str(folder),
        )
    heads = {keys.shape[1] for keys in _cached_keys(cache)}
    if heads - {cached_heads}:
        raise VerificationError(
            f"cache holds {sorted(heads)} KV heads, not {cached_heads}", at=str(folder)
        )
    dtype = str(model.dtype).removeprefix("torch.")
    checks = [
        Check("logits", f"finite over {prompt.shape[1]} tokens in {dtype}"),
        Check("cache", f"cached and uncached logits differ by {spread:.1e} standard deviations"),
    ]
    if heads:
        checks.append(Check("cache shape", f"{cached_heads} KV heads in every layer with keys"))
    return checks


def _prompt(config: Any) -> torch.Tensor:  # noqa: ANN401
    """Random tokens, none of which stands for an image or the like."""
    settings = {**config.to_dict(), **config.get_text_config().to_dict()}
    special = {
        number
        for key, value in settings.items()
        if re.search(r"_token_(id|index)$|vocabulary_map", key)
        for number in _whole_numbers(value)
    }
    vocabulary = int(config.get_text_config().vocab_size)
    plain = torch.tensor([number for number in range(vocabulary) if number not in special])
    generator = torch.Generator().manual_seed(0)
    return plain[torch.randint(len(plain), (1, _PROMPT_TOKENS), generator=generator)]


def _whole_numbers(value: object) -> list[int]:
    values = value.values() if isinstance(value, dict) else value
    return [n for n in (values if isinstance(values, Iterable) else [values]) if isinstance(n, int)]


def _decode(
    model: Any,  # noqa: ANN401
    prompt: torch.Tensor,
    *,
    use_cache: bool,
) -> tuple[torch.Tensor, object]:
    """Decode greedily: logits (steps, vocabulary), and the cache."""
    generated = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        use_cache=use_cache,
        max_new_tokens=_CACHED_STEPS,
        min_new_tokens=_CACHED_STEPS,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return torch.cat(generated.logits).double(), generated.past_key_values


def _difference(cached: torch.Tensor, uncached: torch.Tensor) -> float:
    """Largest difference while both chose the same tokens; after a tie their texts differ."""
    steps = 1
    for a, b in zip(cached[:-1], uncached[:-1], strict=True):
        if int(a.argmax()) != int(b.argmax()):
            break
        steps += 1
    return float((cached[:steps] - uncached[:steps]).abs().max())


def _cached_keys(cache: object) -> Iterator[torch.Tensor]:
    for layer in getattr(cache, "layers", ()):
        keys = getattr(layer, "keys", None)
        if isinstance(keys, torch.Tensor) and keys.ndim == 4 and keys.numel():
            yield keys


def _load_on_meta(folder: Path) -> tuple[Any, dict[str, Any]]:
    with quiet_transformers():
        model, found = model_class(folder).from_pretrained(
            folder, device_map="meta", output_loading_info=True, ignore_mismatched_sizes=True
        )
    return model, found


def _names(keys: set[Any]) -> set[str]:
    """Mismatched keys come with their shapes."""
    return {key if isinstance(key, str) else str(key[0]) for key in keys}


def _dtype_that_fits(folder: Path) -> torch.dtype | str:
    """float32, in which comparisons are sharp, where memory has room; else the stored type."""
    import os

    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return torch.float32 if 2 * stored < 0.6 * available else "auto"
