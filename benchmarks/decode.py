"""Decoding with fewer KV heads against the same model with all of them, at growing context.

    gqaconvert expand SMOLLM2 smollm2-mha --kv-heads 9
    gqaconvert convert SMOLLM2 smollm2-mqa --kv-heads 1
    python benchmarks/decode.py smollm2-mha SMOLLM2 smollm2-mqa --context 512,2k,8k,32k --out DIR

The first model is what the others are compared with. Beside the ratio of times stands the ratio of
bytes, which it should approach; then the parts of a step at the longest context, which tell what
stands in between: writing the longer cache (only --cache-kind static writes nothing but the new
token), and attention over it in each of the ways there are. transformers takes enable_gqa with the
dynamic cache, where no mask is needed, and packed queries with the static one; torch's fused
attention on CPUs goes through the query heads one by one, so enable_gqa saves no time there. Prints
tables and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

from gqaconvert.evaluation.bench import run_bench
from gqaconvert.evaluation.bench_results import Bench, BenchSettings
from gqaconvert.evaluation.cache_kinds import cache_kind
from gqaconvert.kv_cache.model_config import read_config
from gqaconvert.kv_cache.question import parse_tokens
from gqaconvert.modelling.models import LoadedModel, load_model


def median_ms(run: Callable[[], object], repeats: int) -> float:
    times = []
    for number in range(repeats + 1):
        started = time.perf_counter()
        run()
        if number:
            times.append(time.perf_counter() - started)
    return 1e3 * statistics.median(times)


def parts_of_a_step(loaded: LoadedModel, context: int, repeats: int) -> dict[str, float]:
    """Milliseconds that the parts of a step take, all layers together, by themselves."""
    config = read_config(loaded.folder)
    heads, kv_heads, width = config.num_heads, config.num_kv_heads, config.head_dim
    kind, group = loaded.model.dtype, heads // kv_heads
    keys = torch.randn(1, kv_heads, context, width, dtype=kind)
    values, new = torch.randn_like(keys), torch.randn(1, kv_heads, 1, width, dtype=kind)
    query = torch.randn(1, heads, 1, width, dtype=kind)
    packed = query.view(1, kv_heads, group, width)
    ways: dict[str, Callable[[], object]] = {
        "append (copies K and V)": lambda: (
            torch.cat([keys, new], dim=-2),
            torch.cat([values, new], dim=-2),
        ),
        "attention, enable_gqa": lambda: scaled_dot_product_attention(
            query, keys, values, enable_gqa=group > 1
        ),
        "attention, queries packed": lambda: scaled_dot_product_attention(packed, keys, values),
        "attention, heads repeated": lambda: scaled_dot_product_attention(
            query, keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        ),
        "attention, as --attn packed": lambda: (
            torch.softmax((packed @ keys.transpose(-1, -2)).float(), dim=-1).to(kind) @ values
        ),
    }
    with torch.inference_mode():
        return {name: config.num_layers * median_ms(run, repeats) for name, run in ways.items()}


def ratios(bench: Bench) -> list[dict[str, float | str]]:
    """Each model's times and bytes ÷ those of the first, a row a context and batch."""
    facts = {model.name: model for model in bench.models}
    first = bench.models[0].name
    rows = {(row.model, row.context, row.batch): row for row in bench.rows if row.decode}
    table: list[dict[str, float | str]] = []
    for (model, context, batch), row in rows.items():
        base = rows.get((first, context, batch))
        if base is None or row.decode is None or base.decode is None:
            continue
        held, base_held = row.cache_bytes or 0, base.cache_bytes or 1
        whole = (facts[first].read_bytes + base_held) / (facts[model].read_bytes + held)
        pairs = zip(base.decode.values_s, row.decode.values_s, strict=True)
        faster = [slow / fast for slow, fast in pairs]  # of one repeat, so that drift cancels
        table.append(
            {
                "model": model,
                "context": context,
                "batch": batch,
                "ms": 1e3 * row.decode.median_s,
                "times_faster": statistics.median(faster),
                "lowest": min(faster),
                "highest": max(faster),
                "cache_bytes_less": base_held / held,
                "all_bytes_less": whole,
                "share_of_bound": row.share_of_bound or 0.0,
            }
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", help="the first is what others are compared with")
    parser.add_argument("--context", default="512,2k,8k,32k")
    parser.add_argument("--batch", default="1")
    parser.add_argument("--cache-kind", default="dynamic")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--attn", default="sdpa")
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    loaded = [
        load_model(model, dtype=arguments.dtype, attn=arguments.attn) for model in arguments.models
    ]
    settings = BenchSettings(
        contexts=tuple(parse_tokens(part) for part in arguments.context.split(",")),
        batches=tuple(int(part) for part in arguments.batch.split(",")),
        new_tokens=arguments.new_tokens,
        repeats=arguments.repeats,
        prefill_limit_s=0.0,
        threads=arguments.threads,
    )
    bench = run_bench(loaded, [cache_kind(arguments.cache_kind)], settings, out=arguments.out)
    table = ratios(bench)
    print(f"bandwidth {bench.bandwidth.bytes_per_s / 1e9:.3g} GB/s, {arguments.threads} threads")
    print(
        f"{'model':20}{'context':>9}{'batch':>6}{'ms/token':>10}{'× faster':>10}"
        f"{'(min-max)':>14}{'cache ÷':>9}{'all bytes ÷':>12}{'of bound':>10}"
    )
    for row in table:
        spread = f"({row['lowest']:.2f}-{row['highest']:.2f})"
        print(
            f"{row['model']:20}{row['context']:>9}{row['batch']:>6}{row['ms']:>10.1f}"
            f"{row['times_faster']:>10.2f}{spread:>14}{row['cache_bytes_less']:>9.2f}"
            f"{row['all_bytes_less']:>12.2f}{row['share_of_bound']:>10.0%}"
        )
    longest = max(settings.contexts)
    parts = {
        facts.name: parts_of_a_step(model, longest, arguments.repeats)
        for facts, model in zip(bench.models, loaded, strict=True)
    }
    print(f"\nparts of a step at {longest} tokens, batch 1, all layers, ms")
    print(f"{'':28}" + "".join(f"{name:>20}" for name in parts))
    for part in next(iter(parts.values())):
        print(f"{part:28}" + "".join(f"{parts[name][part]:20.1f}" for name in parts))
    content = {"ratios": table, "parts_ms": parts, "bench": bench.to_json()}
    (arguments.out / "decode.json").write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
