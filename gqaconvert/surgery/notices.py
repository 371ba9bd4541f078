"""What a reader should know of a conversion before it runs: limits of the class, of the method."""

from __future__ import annotations

from gqaconvert.surgery.plan import ConversionPlan
from gqaconvert.surgery.source import SourceCheckpoint


def notices_of(plan: ConversionPlan, source: SourceCheckpoint) -> list[str]:
    """Return what to tell with a plan, in sentences."""
    notices = []
    attention, options = plan.attention, plan.options
    if not attention.certified:
        notices.append(
            f"{attention.model_type} is recognised by its names and shapes but is not in the test"
            " matrix; run `gqaconvert verify --forward` on the output"
        )
    degree = options.tensor_parallel
    if degree > options.num_kv_heads:
        notices.append(
            f"{degree} GPUs share {options.num_kv_heads} KV heads: each head is held"
            f" {degree // options.num_kv_heads} times, so nothing more is saved than with"
            f" --kv-heads {degree}"
        )
    notices += _of_method(plan)
    if any(block.key_norm == "full_width" for block in attention.blocks):
        notices.append(
            "keys are normalised over all heads together; with pooled heads that norm sees other"
            " values, so even equal heads give slightly other results"
        )
    if attention.caches_all_heads:
        notices.append(
            f"transformers repeats the KV heads of {attention.model_type} before it caches them:"
            " there the cache does not shrink, only in engines that keep KV heads as they are"
        )
    if source.becomes:
        notices.append(
            f"the class of {source.identity.name} cannot hold fewer KV heads; the output is the"
            f" equivalent {source.becomes}"
        )
    notices += source.notices
    if not source.config.known:
        notices.append(
            f"transformers has no class {source.config.model_type};"
            " only names and shapes were checked"
        )
    return notices


def _of_method(plan: ConversionPlan) -> list[str]:
    """Where a calibrated method can do less than it does elsewhere."""
    notices, options = [], plan.options
    reasons: dict[str, list[str]] = {}
    for module, reason in plan.averaged.items():
        reasons.setdefault(reason, []).append(module)
    for reason, modules in reasons.items():
        notices.append(
            f"{options.method} can do nothing for {len(modules)} of {len(plan.attention.blocks)}"
            f" attention blocks, whose heads are averaged: {reason} (such as {modules[0]})"
        )
    if options.grouping == "similarity":
        fixed = {layer.freedom.heads_fixed for layer in plan.layers if layer.grouping == "adjacent"}
        notices += [f"heads stay with their neighbours: {reason}" for reason in fixed if reason]
    return notices
