"""Builds one `AttentionBlock` from the tensors of one attention module.

Counts come from shapes; the config says how many query heads there are, and for fused projections
the rest. `attention.recognise` finds the modules and checks them against each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from gqaconvert.attention.geometry import Attention, AttentionBlock, HeadTensor, KeyNorm
from gqaconvert.attention.layouts import Layout
from gqaconvert.attention.specs import LayoutSpec, layout_for, naming
from gqaconvert.checkpoint.tensors import StoredTensor
from gqaconvert.errors import CheckpointError, UnsupportedModelError
from gqaconvert.kv_cache.model_config import ModelConfig

CONTRADICTION = (
    "restore the original config.json; to change the number of KV heads, convert the checkpoint"
)
"""What to do when tensors and config.json disagree."""


def split_block(
    module: str,
    parts: Mapping[str, str],
    tensors: Mapping[str, StoredTensor],
    spec: LayoutSpec,
    config: ModelConfig,
) -> AttentionBlock:
    """Build a block of separate projections.

    Args:
        module: path of the attention module.
        parts: "q", "k", "v", "o" → name without ".weight"; without "v", keys serve as values.
        tensors: all tensors.
        spec: how this class stores attention.
        config: the checkpoint's config.

    Raises:
        UnsupportedModelError: a projection is missing or is no matrix.
        CheckpointError: shapes and config contradict each other.
    """
    for part, label in (("q", "query"), ("o", "output")):
        if part not in parts:
            raise UnsupportedModelError(
                f"attention module has keys and values but no {label} projection", at=module
            )
    rows = {part: _matrix(tensors, stem)[0] for part, stem in parts.items()}
    num_heads = _num_heads(config)
    v_head_dim = _divide(_matrix(tensors, parts["o"])[1], num_heads, parts["o"], "query heads")
    value = "v" if "v" in parts else "k"
    num_kv_heads = _divide(rows[value], v_head_dim, parts[value], "dimensions a head")
    head_dim = _divide(rows["k"], num_kv_heads, parts["k"], "KV heads")
    # Gated attention (Qwen3-Next) stores query and gate in one projection.
    if rows["q"] not in (num_heads * head_dim, 2 * num_heads * head_dim):
        raise CheckpointError(
            f"{rows['q']} rows are not {num_heads} query heads of {head_dim}",
            at=parts["q"],
            remedy=CONTRADICTION,
        )
    head_tensors: list[HeadTensor] = []
    if "k" in parts:
        head_tensors += [HeadTensor(n, "k", "key") for n in _parameters(parts["k"], tensors)]
    if "v" in parts:
        head_tensors += [HeadTensor(n, "v", "value") for n in _parameters(parts["v"], tensors)]
    key_norm, norm_tensors, norm_modules = _key_norm(
        module, tensors, spec, num_kv_heads, head_dim, config
    )
    return AttentionBlock(
        module=module,
        layer=layer_number(module),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        head_tensors=(*head_tensors, *norm_tensors),
        key_norm=key_norm,
        norm_modules=norm_modules,
        biases="".join(p for p in "qkvo" if p in parts and f"{parts[p]}.bias" in tensors),
        stems=dict(parts),
    )


def fused_block(
    module: str,
    parts: Mapping[str, str],
    tensors: Mapping[str, StoredTensor],
    spec: LayoutSpec,
    config: ModelConfig,
) -> AttentionBlock:
    """Build a block of one projection for q, k and v.

    Args:
        module: path of the attention module.
        parts: "qkv", and "o" where there is one → name without ".weight".
        tensors: all tensors.
        spec: how this class stores attention.
        config: the checkpoint's config.

    Raises:
        UnsupportedModelError: the projection is no matrix.
        CheckpointError: shapes and config contradict each other.
    """
    stem = parts["qkv"]
    rows = _matrix(tensors, stem)[0]
    num_heads, num_kv_heads, width = _num_heads(config), config.num_kv_heads, config.head_dim
    if rows != (num_heads + 2 * num_kv_heads) * width:
        raise CheckpointError(
            f"{rows} rows are not {num_heads} query and 2 × {num_kv_heads} KV heads of {width},"
            " as the config says",
            at=stem,
            remedy=CONTRADICTION,
        )
    layout = _fused_layout(spec, num_kv_heads)
    names = _parameters(stem, tensors)
    biases = "qkv" if len(names) == 2 else ""
    if "o" in parts and f"{parts['o']}.bias" in tensors:
        biases += "o"
    key_norm, norm_tensors, norm_modules = _key_norm(
        module, tensors, spec, num_kv_heads, width, config
    )
    return AttentionBlock(
        module=module,
        layer=layer_number(module),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=width,
        v_head_dim=width,
        head_tensors=(*(HeadTensor(name, layout, "fused") for name in names), *norm_tensors),
        key_norm=key_norm,
        norm_modules=norm_modules,
        biases=biases,
        stems=dict(parts),
    )


def fused_layout_after(attention: Attention, layout: Layout, wanted: int) -> Layout:
    """Return the layout of a fused weight once it holds `wanted` KV heads.

    Only the step to or from a single head can change it.
    """
    spec = layout_for(attention.model_type)
    return _fused_layout(spec, wanted) if spec.fused else layout


def layer_number(module: str) -> int | None:
    """Return the number of the layer in a dotted path, None where it has none."""
    parts = module.split(".")
    for before, part in pairwise(parts):
        if before in naming().layer_lists and part.isdigit():
            return int(part)
    return None


def _fused_layout(spec: LayoutSpec, num_kv_heads: int) -> Layout:
    layout = spec.layout
    if num_kv_heads == 1 and spec.layout_multi_query:
        layout = spec.layout_multi_query
    if layout == "split":
        raise ValueError(f"spec {spec.name} names a fused projection but no row order")
    return layout


def _key_norm(
    module: str,
    tensors: Mapping[str, StoredTensor],
    spec: LayoutSpec,
    num_kv_heads: int,
    head_dim: int,
    config: ModelConfig,
) -> tuple[KeyNorm, list[HeadTensor], tuple[tuple[str, ...], ...]]:
    for norm in spec.key_norm:
        names = _parameters(f"{module}.{norm}", tensors)
        if names:
            shape = tensors[names[0]].shape
            full_width = config.text_model_type in spec.full_width_key_norm
            if shape == (head_dim,) and not full_width:
                return "per_head", [], ()
            if shape in ((num_kv_heads * head_dim,), (num_kv_heads, head_dim)):
                kind: KeyNorm = "full_width" if len(shape) == 1 else "per_kv_head"
                return kind, [HeadTensor(name, "k", "key_norm") for name in names], ()
            raise UnsupportedModelError(
                f"key norm of shape {list(shape)} fits neither {num_kv_heads} KV heads"
                f" nor one head of {head_dim}",
                at=names[0],
            )
        modules = tuple(
            found
            for kind in ("weight", "bias")
            if (found := _numbered(f"{module}.{norm}.norms", kind, tensors))
        )
        if modules:
            if any(len(found) != num_kv_heads for found in modules):
                raise CheckpointError(
                    f"{len(modules[0])} key norms for {num_kv_heads} KV heads", at=modules[0][0]
                )
            return "per_kv_head_modules", [], modules
    return "none", [], ()


def _parameters(stem: str, tensors: Mapping[str, StoredTensor]) -> list[str]:
    return [name for kind in ("weight", "bias") if (name := f"{stem}.{kind}") in tensors]


def _numbered(prefix: str, kind: str, tensors: Mapping[str, StoredTensor]) -> tuple[str, ...]:
    names: list[str] = []
    while (name := f"{prefix}.{len(names)}.{kind}") in tensors:
        names.append(name)
    return tuple(names)


def _num_heads(config: ModelConfig) -> int:
    if not config.num_heads:
        raise CheckpointError(
            "number of attention heads is missing",
            at=config.at,
            remedy="restore the original config.json",
        )
    return config.num_heads


def _matrix(tensors: Mapping[str, StoredTensor], stem: str) -> tuple[int, int]:
    shape = tensors[f"{stem}.weight"].shape
    if len(shape) != 2:
        raise UnsupportedModelError(
            f"projection of shape {list(shape)} is not a matrix", at=f"{stem}.weight"
        )
    return shape[0], shape[1]


def _divide(size: int, parts: int, at: str, what: str) -> int:
    if parts == 0 or size % parts or size == 0:
        raise CheckpointError(
            f"{size} does not divide by {parts} {what}", at=at, remedy=CONTRADICTION
        )
    return size // parts
