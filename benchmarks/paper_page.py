"""Writes the page of `paper.py`: every figure in it is computed from `paper.json`.

What the text says beyond figures and verdicts is fixed, in `_WHY`: it explains differences of setup
and claims no outcome.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from pathlib import Path

from paper_protocol import DISTILLATION, FITTED, MHA, NEXT_TOKEN, SOURCE
from paper_results import MAIN, SHARES, Claim, Results, claims, heads_name, percent, signed

_INTRO = """\
# The GQA paper on a page

Ainslie et al., *GQA: Training Generalized Multi-Query Transformer Models from Multi-Head
Checkpoints* ([arXiv 2305.13245](https://arxiv.org/abs/2305.13245)), turn T5 models with multi-head
attention (MHA) into ones with one KV head (MQA) or a few (GQA) by averaging heads, and train them
on for a small share α of their pretraining. This page repeats the ablations on the bundled model, a
decoder of 3.7M parameters with 8 KV heads, and puts the methods of this package beside them. It is
small, but all of it is measured."""

_WHY = """\
## Why it may differ

- **Positions.** T5 adds a bias to the attention scores, and its queries and keys know nothing of
  positions. The bundled model turns queries and keys by RoPE, plane by plane, and each trained head
  has its own basis within what that leaves free: an average over heads is one over unlike things.
- **Size.** The model has 8 heads of 32 in all, in four layers: with GQA-2, four query heads share
  one narrow KV head. The paper's GQA-8 keeps eight.
- **What is measured.** The paper fine-tunes on tasks and reports their scores. Here it is the
  perplexity of held-out text, which shows small losses at once.
- **What is trained how.** The paper goes on with the optimiser and schedule of pretraining. The
  bundled model's schedule ended at a learning rate of zero, so here each share is a run of its own,
  warmed up and led to zero again, not a mark on one long run. Its matrices were pretrained with
  Muon and are uptrained with AdamW. MHA trained on for the same share, warming up included, is what
  the others are to be compared with: a gain over the source may be just more training.
- **Repeated text.** Its pretraining went over the same text 3.8 times, and uptraining reads from it
  again.
- **Time.** The paper times TPUs. Here it is a CPU, where attention costs arithmetic too. The
  weights take 15 MB in float32, so the batch is large, and the cache outweighs them many times;
  `--attn packed` reads each KV head once."""


def markdown_table(results: Results) -> str:
    """Perplexity by run and share, with its error."""
    shares = [f"α = {percent(share)}" for share in SHARES]
    lines = ["| | " + " | ".join(shares) + " |", "|---" * (len(shares) + 1) + "|"]
    starts = dict.fromkeys(
        (point["kv_heads"], point["start"]) for point in results.content["points"]
    )
    order = {name: n for n, name in enumerate((SOURCE, "mean", "first", "random", "svd", FITTED))}
    for heads, start in sorted(starts, key=lambda each: (-each[0], order[each[1]])):
        for loss in (NEXT_TOKEN, DISTILLATION):
            curve = results.curve(heads, start, loss)
            if loss == DISTILLATION and len(curve) < 2:
                continue
            cells = [results.say(curve.get(share)) for share in SHARES]
            name = f"{heads_name(heads)}, {'trained on' if start == SOURCE else f'`{start}`'}"
            name += ", distilled" if loss == DISTILLATION else ""
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_page(results: Results, path: Path, figures: Sequence[Path]) -> None:
    """Write the page; figures are linked relative to it."""
    conversion, uptraining, groups = (
        Path(os.path.relpath(figure, path.parent)).as_posix() for figure in figures
    )
    parts = [
        _INTRO,
        _quick_warning(results),
        "## What the paper says, and what is seen here",
        _claims_table(claims(results)),
        _wrapped(_errors(results)),
        "## How heads become one",
        f"![Perplexity by method of conversion, at three shares of uptraining]({conversion})",
        "*Bars: two standard errors of the ratio to the source, over windows of text.*",
        _wrapped(_order(results)),
        "## How much uptraining",
        f"![Perplexity against the share of uptraining]({uptraining})",
        _wrapped(_control(results)),
        "## How many KV heads",
        f"![Time of a step of decoding, and perplexity, by number of KV heads]({groups})",
        _wrapped(_time(results)),
        "## The same with the methods of this package",
        _starts_table(results),
        _wrapped(_ours(results)),
        "## All figures",
        markdown_table(results),
        _wrapped(
            "Perplexity of held-out text ± the standard error of its ratio to the source's, over"
            " the same windows."
        ),
        _WHY,
        "## How it was made",
        f"```\n{results.content['command']}\npython benchmarks/paper.py --page docs/paper.md\n```",
        _wrapped(_how(results)),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")


def _wrapped(text: str) -> str:
    for together in (" %", " ± "):  # no line ends within a number
        text = text.replace(together, together.replace(" ", "\N{NO-BREAK SPACE}"))
    lines = textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)
    return lines.replace("\N{NO-BREAK SPACE}", " ")


def _quick_warning(results: Results) -> str:
    if not results.content["quick"]:
        return ""
    return (
        "**Made with `--quick`, a few steps of each run: the figures on this page mean nothing.**"
    )


def _claims_table(found: Sequence[Claim]) -> str:
    lines = ["| the paper | here | |", "|---|---|---|"]
    lines += [f"| “{claim.quote}” | {claim.here or '–'} | {claim.verdict} |" for claim in found]
    return "\n".join(lines)


def _errors(results: Results) -> str:
    spread = results.seed_spread
    seeds = "not measured" if spread is None else f"a standard deviation of {spread:.3f} nats"
    return (
        "Verdicts are computed. Runs are compared over the same windows of text, and a difference"
        f" counts from twice its error on, in which the spread between seeds has a part ({seeds})."
        " “Reasonable” is read as a perplexity of at most twice the source's, “close” as the nearer"
        " half of the way, “diminishing” as a smaller gain than before."
    )


def _order(results: Results) -> str:
    said, after = [], []
    for heads in (1, 2):
        mean, first = results.get(heads, "mean"), results.get(heads, "first")
        if mean is not None and first is not None:
            words = {1: "better than", -1: "worse than", 0: "not to be told from"}
            said.append(
                f"with {heads} KV head{'s' * (heads > 1)} the mean ({results.say(mean)}) is"
                f" {words[results.better(mean, first)]} the first head ({results.say(first)})"
            )
        for method in ("first", "random"):
            trained = results.get(heads, "mean", MAIN)
            other = results.get(heads, method, MAIN)
            if trained is not None and other is not None:
                value, error = results.difference(other, trained)
                after.append(f"{heads_name(heads)} `{method}` {signed(value)} ± {error:.3f}")
    text = f"Before any training, {' and '.join(said)}." if said else ""
    if after:
        text += (
            f" After {percent(MAIN)}, loss in nats a token against the mean: {', '.join(after)}."
        )
    return text


def _control(results: Results) -> str:
    said = [
        f"{results.say(point)} after {percent(share)}"
        for share, point in results.curve(MHA, SOURCE).items()
        if share
    ]
    text = f"The source stands at {results.perplexity(results.source):.2f}"
    text += f"; trained on in the same way, at {', '.join(said)}." if said else "."
    closed = []
    for heads in (1, 2):
        curve = results.curve(heads, "mean")
        if {0.0, MAIN} <= curve.keys():
            gap = curve[0.0]["nll"] - results.source["nll"]
            share = (curve[0.0]["nll"] - curve[MAIN]["nll"]) / gap
            closed.append(f"{percent(share)} ({heads_name(heads)})")
    if closed:
        text += (
            f" Of the loss that conversion by `mean` added, {percent(MAIN)} of uptraining takes"
            f" back {' and '.join(closed)}."
        )
    return text


def _time(results: Results) -> str:
    protocol = results.content["protocol"]
    short, long = sorted(protocol["bench_contexts"])
    rows, brief = results.timing_rows(long), results.timing_rows(short)
    if not rows or not brief:
        return ""
    most, least = rows[-1], rows[0]
    moved = [row["read_bytes"] + row["cache_bytes"] for row in (most, least)]
    threads = results.content["timing"]["threads"]
    return (
        f"A step with {long:,} tokens in each of {most['batch']} caches takes"
        f" {most['median_s'] / least['median_s']:.1f} times as long with {most['kv_heads']} KV"
        f" heads as with {least['kv_heads']}, and reads {moved[0] / moved[1]:.1f} times the bytes;"
        f" with {short} tokens it takes {brief[-1]['median_s'] / brief[0]['median_s']:.1f} times as"
        " long. Arithmetic follows the query heads, which stay, so that time does not follow bytes"
        f" all the way. Float32, static cache, `packed` attention, {threads}"
        f" thread{'s' * (threads > 1)}, {protocol['bench_repeats']} repeats, the models taking"
        " turns."
    )


def _starts_table(results: Results) -> str:
    lines = [
        "| before uptraining | MQA | GQA-2 | GQA-4 | seconds to make MQA |",
        "|---|---|---|---|---|",
    ]
    for start in ("mean", "svd", FITTED):
        points = [results.get(heads, start) for heads in (1, 2, 4)]
        seconds = "" if points[0] is None else f"{points[0]['start_seconds']:.1f}"
        lines.append(f"| `{start}` | " + " | ".join(map(results.say, points)) + f" | {seconds} |")
    return "\n".join(lines)


def _ours(results: Results) -> str:
    content, protocol = results.content, results.content["protocol"]
    text = (
        f"`svd` needs statistics of {protocol['calibration_tokens']:,} tokens of training text,"
        f" gathered once in {content['statistics_seconds']:.1f} s; the fit trains the attention of"
        " each layer to give the source's outputs on the source's inputs,"
        f" {protocol['fit_steps']} steps on {protocol['fit_windows'] * protocol['fit_context']:,}"
        " tokens. Neither is counted in α."
    )
    best, plain = results.get(1, FITTED), results.curve(1, "mean")
    beaten = [share for share, p in plain.items() if best and results.better(best, p) == 1]
    if any(beaten):
        text += (
            " MQA from the fit, before any uptraining, is ahead of MQA from the mean after"
            f" {percent(max(beaten))} of uptraining."
        )
    ways = {
        "the paper's way": results.get(1, "mean", MAIN),
        "mean, distilled from the source": results.get(1, "mean", MAIN, DISTILLATION),
        "svd + fit, next-token loss": results.get(1, FITTED, MAIN),
        "svd + fit, distilled": results.get(1, FITTED, MAIN, DISTILLATION),
    }
    said = [f"{name} {results.say(point)}" for name, point in ways.items() if point is not None]
    return text + (f" MQA after {percent(MAIN)}: {'; '.join(said)}." if said else "")


def _how(results: Results) -> str:
    content, protocol = results.content, results.content["protocol"]
    rates = [point["tokens_per_s"] for point in content["points"] if point["tokens_per_s"]]
    speed = f", {min(rates):,.0f} to {max(rates):,.0f} tokens/s" if rates else ""
    libraries = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    commits = ", ".join(dict.fromkeys(point["commit"] for point in content["points"]))
    return (
        f"Commit {commits}, threads: {content['threads']}. α refers to the"
        f" {protocol['pretraining_tokens']:,} tokens of the bundled model's pretraining; a run ends"
        f" at the nearest step. All weights train with AdamW at {protocol['lr']:g}, warmed up over"
        " 5 % of the steps and led to 0 by a cosine, on batches of"
        f" {protocol['batch_tokens']:,} tokens of the text it was pretrained on, in"
        f" {protocol['precision']}{speed}. Perplexity is taken in float32 on"
        f" {len(results.source['counts'])} windows of {protocol['context']:,} tokens spread over"
        f" held-out text ({content['text']['sha256'][:12]}). Versions: {libraries}."
    )
