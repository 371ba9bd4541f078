r"""The ablations of the GQA paper (arXiv 2305.13245) on the bundled model, and ours beside them.

    python benchmarks/paper.py --threads 2                      # half an hour; OUT/paper.json
    python benchmarks/paper.py --page docs/paper.md             # the page and its figures, from it
    python benchmarks/paper.py --quick --out /tmp/paper         # a minute or two; no real figures

Methods of conversion, shares of uptraining, numbers of KV heads against quality and time. Restart
it as often as you like: finished runs are kept below --out, those that matter most come first, and
none is begun that would end after --minutes. Run it with nothing else on the machine: it times.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from paper_figures import draw_all
from paper_page import markdown_table, write_page
from paper_protocol import DISTILLATION, MHA, STARTS, TRAININGS, Protocol, Run, quick
from paper_results import Results, claims

from gqaconvert.evaluation.results import library_versions

TOKENS_PER_S = 6000.0
"""Of next-token training on two quiet cores, until a run has been seen."""

DISTILLATION_COST = 1.4
HEADS = (MHA, 4, 2, 1)
MEASURING_S = 8.0
TIMING_S = 60.0


def pretraining_tokens() -> int:
    """What the bundled model was trained on, as its log says."""
    log = Path(__file__).with_name("train_tiny_log.jsonl").read_text(encoding="utf-8")
    return int(json.loads(log.splitlines()[-1])["tokens"])


def seconds_of(run: Run, protocol: Protocol, tokens_per_s: float) -> float:
    """What a run is expected to take."""
    tokens = protocol.steps(run.share) * protocol.batch_tokens if run.share else 0
    cost = DISTILLATION_COST if run.loss == DISTILLATION else 1.0
    return MEASURING_S + tokens * cost / tokens_per_s


def rate_of(points: list[dict[str, Any]]) -> float:
    """Tokens a second of next-token training, of the runs seen so far."""
    plain = [p for p in points if p["share"] and p["loss"] != DISTILLATION]
    spent = sum(point["seconds"] for point in plain)
    return sum(point["tokens"] for point in plain) / spent if spent else TOKENS_PER_S


def commit() -> str:
    """The commit of the code, with a plus where files differ from it."""
    here = Path(__file__).parent
    words = ["git", "-C", str(here), "describe", "--always", "--dirty=+", "--abbrev=7"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def measure(options: argparse.Namespace, protocol: Protocol) -> dict[str, Any]:
    """Make what is missing, and write `paper.json` after each run."""
    from paper_runs import Laboratory

    laboratory = Laboratory(options.out, protocol, commit(), tell)
    runs = [*STARTS, *TRAININGS]
    points = [point for run in runs if (point := laboratory.found(run.name)) is not None]
    timing = laboratory.found("timing")
    begun = time.monotonic()

    def save() -> dict[str, Any]:
        content = {
            "points": [{k: v for k, v in p.items() if k != "protocol"} for p in points],
            "timing": timing, "text": laboratory.text, "quick": options.quick,
            "statistics_seconds": laboratory.statistics_seconds,
            "protocol": laboratory.protocol, "threads": options.threads,
            "versions": library_versions(), "python": platform.python_version(),
            "command": "python benchmarks/" + shlex.join(shown_command()),
        }  # fmt: skip
        staged = options.out / ".paper.json.partial"
        staged.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        staged.replace(options.out / "paper.json")
        return content

    left = [run for run in runs if laboratory.found(run.name) is None]
    whole = sum(seconds_of(run, protocol, rate_of(points)) for run in left)
    whole += TIMING_S if timing is None else 0.0
    tell(f"{len(points)} of {len(runs)} runs are there; the others take {whole / 60:.0f} minutes")
    for number, run in enumerate(left):
        if timing is None and run.share:
            tell("timing decoding")
            timing = laboratory.time(HEADS, options.threads)
        ahead = seconds_of(run, protocol, rate_of(points))
        if time.monotonic() - begun + ahead > 60 * options.minutes:
            tell(f"{run.name} would end after {options.minutes:g} minutes: left out")
            continue
        rest = sum(seconds_of(other, protocol, rate_of(points)) for other in left[number:])
        tell(f"{run.name}: {ahead:.0f} s; with all after it {rest / 60:.0f} minutes")
        points.append(laboratory.make(run))
        save()
    if timing is None:
        timing = laboratory.time(HEADS, options.threads)
    order = [run.name for run in runs]
    points.sort(key=lambda point: order.index(point["name"]))
    return save()


def shown_command() -> list[str]:
    """The command without folders, which say nothing to a reader."""
    words = ["paper.py", *sys.argv[1:]]
    return [word for n, word in enumerate(words) if "--out" not in (word, words[n - 1])]


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/paper"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=35.0)
    parser.add_argument("--quick", action="store_true", help="a few steps of each run")
    parser.add_argument("--page", type=Path, help="only write this page, from OUT/paper.json")
    parser.add_argument("--figures", type=Path, help="folder; by default `figures` by the page")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.page:
        path = options.out / "paper.json"
        results = Results(json.loads(path.read_text(encoding="utf-8")))
        figures = draw_all(results, options.figures or options.page.parent / "figures")
        write_page(results, options.page, figures)
        print(f"wrote {options.page} and {', '.join(map(str, figures))}")
        return
    protocol = Protocol(pretraining_tokens=pretraining_tokens())
    options.out.mkdir(parents=True, exist_ok=True)
    results = Results(measure(options, quick(protocol) if options.quick else protocol))
    print(markdown_table(results))
    for claim in claims(results):
        print(f"\n{claim.verdict.upper()}: {claim.quote}\n  {claim.here}")


if __name__ == "__main__":
    main()
