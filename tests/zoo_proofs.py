"""Proofs that need no converter: repeat KV heads on disk, decode with and without a cache.

Written against the layouts as transformers reads them and independent of gqaconvert, so that its
results can be held against these.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from zoo import NUM_HEADS, Entry, inputs, largest_difference, text_model


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint folder, by their names on disk."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(path))
    return tensors


def repeat_kv_heads(
    folder: Path, entry: Entry, *, num_kv_heads: int, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Rewrite a checkpoint of one file with more KV heads, each repeated for its group.

    Args:
        folder: a checkpoint of one file; its weights are replaced, its config is not.
        entry: what it is a model of.
        num_kv_heads: how many it has.
        shapes: names and shapes that the wider model has on disk.
    """
    tensors = read_tensors(folder)
    repeats = max(entry.legal) // num_kv_heads
    wider = {name: tensor for name, tensor in tensors.items() if not entry.is_changed(name)}
    for name in filter(entry.is_changed, shapes):
        if ".norms." in name:  # one module a head: copies, not longer tensors
            wider[name] = tensors[_of_source_head(name, repeats)].clone()
        elif entry.layout == "split":
            wider[name] = _repeat_rows(
                tensors[name], shapes[name][0] // repeats, num_kv_heads, repeats
            )
        else:
            wider[name] = _repeat_fused(tensors[name], entry, num_kv_heads, repeats)
    (folder / "model.safetensors").unlink()
    save_file(wider, folder / "model.safetensors", metadata={"format": "pt"})


def _of_source_head(name: str, repeats: int) -> str:
    return re.sub(r"\.norms\.(\d+)\.", lambda found: f".norms.{int(found[1]) // repeats}.", name)


def _repeat_rows(tensor: torch.Tensor, rows: int, num_kv_heads: int, repeats: int) -> torch.Tensor:
    if tensor.shape[0] != rows:
        raise AssertionError(f"{tuple(tensor.shape)} does not grow by {repeats}")
    heads = tensor.reshape(num_kv_heads, -1, *tensor.shape[1:])
    return heads.repeat_interleave(repeats, 0).reshape(-1, *tensor.shape[1:]).contiguous()


def _repeat_fused(
    tensor: torch.Tensor, entry: Entry, num_kv_heads: int, repeats: int
) -> torch.Tensor:
    head_dim = tensor.shape[0] // (NUM_HEADS + 2 * num_kv_heads)
    heads = tensor.reshape(-1, head_dim, *tensor.shape[1:])
    if entry.layout == "per_group":
        groups = heads.unflatten(0, (num_kv_heads, -1))
        q, k, v = groups[:, :-2].flatten(0, 1), groups[:, -2], groups[:, -1]
    else:
        q, k, v = heads.split([NUM_HEADS, num_kv_heads, num_kv_heads])
    k, v = k.repeat_interleave(repeats, 0), v.repeat_interleave(repeats, 0)
    if entry.layout == "blocks":
        wider = torch.cat([q, k, v])
    else:  # with a KV head for each query head, by group and by head are the same
        wider = torch.stack([q, k, v], 1).flatten(0, 1)
    return wider.flatten(0, 1).contiguous()


def set_kv_heads(folder: Path, entry: Entry, num_kv_heads: int) -> None:
    """Change the number of KV heads in config.json, and nothing else."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    for key in entry.config_changes:
        *parents, last = key.split(".")
        level = config
        for parent in parents:
            level = level[parent]
        level[last] = num_kv_heads == 1 if last == "multi_query" else num_kv_heads
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")


def check_cached_generation(
    model: PreTrainedModel,
    *,
    num_kv_heads: int,
    seed: int = 0,
    new_tokens: int = 6,
    tolerance: float = 1e-3,
) -> None:
    """Decode greedily with and without a cache: same tokens and logits, KV heads as expected.

    Raises:
        AssertionError: any of these differs, or no layer caches K and V.
    """
    settings = {
        "max_new_tokens": new_tokens,
        "min_new_tokens": new_tokens,
        "do_sample": False,
        "pad_token_id": 0,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    model = text_model(model)
    prompt = inputs(model, seed)["input_ids"]
    with_cache = model.generate(prompt, use_cache=True, **settings)
    without = model.generate(prompt, use_cache=False, **settings)
    differences = [
        largest_difference(a, b) for a, b in zip(with_cache.logits, without.logits, strict=True)
    ]
    assert torch.equal(with_cache.sequences, without.sequences), differences
    assert max(differences) <= tolerance, differences
    check_cache(
        with_cache.past_key_values,
        num_kv_heads=num_kv_heads,
        tokens=prompt.shape[1] + new_tokens - 1,
    )


def check_cache(cache: object, *, num_kv_heads: int, tokens: int, batch: int = 2) -> None:
    """Every layer that caches K and V holds (B, G, T, D), or (B, G, T' < T, D) behind a window.

    Raises:
        AssertionError: a layer holds another shape, or none caches K and V.
    """
    attention = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    assert attention, "no layer caches K and V"
    for layer in attention:
        for state in (layer.keys, layer.values):
            held = state.shape[2]
            assert state.shape[:2] == (batch, num_kv_heads), (type(layer).__name__, state.shape)
            assert held <= tokens, (type(layer).__name__, state.shape)
            if not getattr(layer, "is_sliding", False):
                assert held == tokens, (type(layer).__name__, state.shape)
