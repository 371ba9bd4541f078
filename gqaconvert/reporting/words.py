"""What a run came to in plain sentences, worked out from its figures."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gqaconvert.reporting.caches import quality_kept
from gqaconvert.reporting.numbers import figure, plural
from gqaconvert.reporting.saved import CONVERTED, SOURCE, UPTRAINED, SavedRun
from gqaconvert.reporting.subjects import Subject, baseline_of, with_role
from gqaconvert.units import format_count, format_memory

_DONE = {
    "mean": "averaged into", "first": "reduced to their first, leaving",
    "random": "replaced by freshly drawn ones, leaving", "procrustes": "aligned and averaged into",
    "svd": "fitted to",
}  # fmt: skip


def summary_of(run: SavedRun, subjects: Sequence[Subject]) -> str:
    """Say what was converted, what that saves and what it costs.

    Args:
        run: to tell of.
        subjects: its models.
    """
    ours = [subject for subject in subjects if subject.run is run]
    sentences = [_converted(run, ours), _saved(ours), _cost(run, ours)]
    told = " ".join(sentence for sentence in sentences if sentence)
    if told:
        return told
    return f"{plural(len(ours), 'model')} side by side: {', '.join(s.model for s in ours)}."


def _converted(run: SavedRun, ours: Sequence[Subject]) -> str:
    if run.manifest is None:
        return _swept(run)
    plan = run.manifest["plan"]
    before, after = plan["kv_heads"]["before"], plan["kv_heads"]["after"]
    source = with_role(ours, SOURCE)
    name = source.model if source else run.manifest["source"]["name"]
    if after >= before:
        return f"Each of the {before} key and value heads in each layer of {name} was repeated" \
               f" to make {after}."  # fmt: skip
    method = plan["options"]["method"]
    done = _DONE.get(method, "pooled into")
    return (
        f"The {before} key and value heads in each layer of {name}, shared by"
        f" {plan['num_heads']} query heads, were {done} {after} (method {method})."
    )


def _swept(run: SavedRun) -> str:
    if run.sweep is None:
        return ""
    counts = [p["kv_heads"] for p in run.sweep["points"] if p["kind"] == "conversion"]
    if not counts:
        return ""
    return (
        f"{run.sweep['source']} was converted to"
        f" {', '.join(str(count) for count in dict.fromkeys(counts))} KV heads, none of them"
        " trained afterwards."
    )


def _saved(ours: Sequence[Subject]) -> str:
    source = with_role(ours, SOURCE)
    other = with_role(ours, UPTRAINED) or with_role(ours, CONVERTED)
    if source is None or other is None:
        return ""
    before, after = source.kv_bytes_per_token, other.kv_bytes_per_token
    if not before or not after:
        return ""
    verb = "shrinks" if after < before else "grows"
    text = (
        f"The KV cache {verb} from {format_memory(before)} to {format_memory(after)} a token"
        f" ({100 * after / before:.3g} %)"
    )
    rows = source.estimate, other.estimate
    if rows[0] is None or rows[1] is None:
        return f"{text}."
    fits = rows[0]["concurrent_requests"], rows[1]["concurrent_requests"]
    memory = rows[1]["memory_bytes"]
    if fits[0] is None or fits[1] is None or not memory:
        return f"{text}."
    return (
        f"{text}, so that {format_memory(memory)} of device memory hold {fits[1]:,} requests of"
        f" {rows[1]['context']:,} tokens instead of {fits[0]:,}."
    )


def _cost(run: SavedRun, ours: Sequence[Subject]) -> str:
    source, converted = with_role(ours, SOURCE), with_role(ours, CONVERTED)
    uptrained = with_role(ours, UPTRAINED)
    start = None if source is None else source.value("perplexity")
    last = uptrained or converted
    if start is None or last is None or quality_kept(last, baseline_of(ours, last)) is None:
        return ""
    pooled = None if converted is None else converted.value("perplexity")
    trained = None if uptrained is None else uptrained.value("perplexity")
    tokens = (run.summary or {}).get("tokens")
    amount = f" on {format_count(tokens)} tokens" if tokens else ""
    if trained is None:
        told = f"Without training, perplexity is {figure(pooled or math.nan)}" \
               f" where the source has {figure(start)}"  # fmt: skip
    elif pooled is None:
        told = f"After uptraining{amount}, perplexity is {figure(trained)}" \
               f" where the source has {figure(start)}"  # fmt: skip
    else:
        told = (
            f"In return, perplexity goes from {figure(start)} to {figure(pooled)} with the"
            f" conversion and to {figure(trained)} after uptraining{amount}"
        )
        told += _won_back(start, pooled, trained)
    one = last.measured("divergence")
    agreement = None if one is None else one.detail.get("top1_agreement")
    if agreement is not None:
        told += f"; its most likely next token is the source's in {100 * agreement:.3g} % of places"
    return f"{told}."


def _won_back(start: float, pooled: float, trained: float) -> str:
    """Share of the loss that conversion added and training took away again."""
    lost = math.log(pooled) - math.log(start)
    if lost < 0.01:
        return ""
    share = (math.log(pooled) - math.log(trained)) / lost
    if share < 0:
        return ", which wins nothing back"
    return f", which wins back {100 * share:.0f} % of the loss in nats"
