"""How the commands of the pages are run in tests: what is appended, and what is not run, and why.

A command that no rule names runs as it is written.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """What is done with the commands that a pattern finds.

    Attributes:
        pattern: regular expression, looked for in the command as one line.
        reason: why.
        append: words put after the command's own; the last of two values of an option counts.
        slow: run in the slow tests only.
    """

    pattern: str
    reason: str
    append: str = ""
    slow: bool = False


SHORT_TRAINING = (
    "--set 'uptrain.budget={steps: 2}' --set uptrain.batch_tokens=128 --set uptrain.micro_batch=1"
    " --set uptrain.data.context=64 --set uptrain.held_out.windows=1"
    " --set convert.calibration_tokens=1024 --set convert.fit_steps=1"
)
SHORT_RUN = (
    f"{SHORT_TRAINING} --set evaluate.windows=2 --set evaluate.context=64"
    " --set evaluate.task_limit=2 --set 'evaluate.cache=[dynamic]' --set 'bench.contexts=[16]'"
    " --set bench.new_tokens=1 --set bench.repeats=1 --set 'sweep.kv_heads=[4]'"
    " --set sweep.windows=2"
)

RULES = (
    # --- devices that are not here: what the run would take is computed, nothing is trained ---
    Rule(r"^gqaconvert uptrain .*--dry-run", "nothing is trained: as it is written"),
    Rule(
        r"^gqaconvert uptrain .*--accelerate-config (ddp|fsdp2|multi_node|single_gpu)",
        "needs GPUs",
        append="--dry-run",
    ),
    # --- real, and shortened ---
    Rule(
        r"^gqaconvert uptrain .*--num-processes",
        "each process imports torch and transformers anew",
        append=f"{SHORT_TRAINING} --overwrite",
        slow=True,
    ),
    Rule(r"^gqaconvert uptrain .*--resume", "minutes of training", append=SHORT_TRAINING),
    Rule(
        r"^gqaconvert uptrain ",
        "minutes of training, and pages name one run twice",
        append=f"{SHORT_TRAINING} --overwrite",
    ),
    Rule(r"^gqaconvert run .*--dry-run", "nothing is run: as it is written"),
    Rule(
        r"^gqaconvert run .*--accelerate-config (ddp|fsdp2|multi_node|single_gpu)",
        "needs GPUs",
        append="--dry-run",
    ),
    Rule(r"^gqaconvert run ", "minutes", append=SHORT_RUN),
    Rule(
        r"^gqaconvert evaluate ",
        "minutes of measuring",
        append="--windows 1 --context 64 --limit 2",
    ),
    Rule(
        r"^gqaconvert bench ",
        "minutes of measuring",
        append="--context 16,32 --batch 1 --repeats 1 --warmup 0 --new-tokens 1",
    ),
    Rule(
        r"^gqaconvert sweep (?!.*--predict)",
        "minutes of measuring",
        append="--windows 1 --context 32 --cache-windows 1 --calibration-tokens 1024",
    ),
    Rule(r"^gqaconvert calibrate ", "minutes", append="--tokens 512 --context 64"),
    Rule(
        r"^gqaconvert convert .*--(fit|distill)-steps",
        "minutes of fitting",
        append="--tokens 512 --context 64 --fit-windows 8 --fit-steps 1",
    ),
    Rule(r"^gqaconvert convert .*--calibration \S+\.txt", "a minute", append="--tokens 512"),
)
"""The first that finds a command is its rule."""

NOT_RUN = (
    Rule(r"^(uv )?pip install|^uv venv", "the environment of the tests is not to be changed"),
    Rule(r"^pytest", "the tests are running"),
    Rule(r"^make ", "tests, builds and benchmarks have jobs of their own"),
    Rule(r"^hf auth login", "asks for a token"),
    Rule(r"^accelerate launch ", "needs GPUs; tests/training launches it on CPUs"),
    Rule(r"^python (benchmarks|scripts)/", "minutes to hours; that the script exists is tested"),
)
"""Commands that are not run at all."""

PROGRAMS = frozenset(
    {"gqaconvert", "python", "pip", "pytest", "make", "hf", "uv", "accelerate", "cd", "git"}
)
"""First words that make a line of an unmarked block a command."""

OTHER_BLOCKS = {
    ("README.md", "model        parameters    disk"): "SmolLM2, measured: RESULTS.md",
    ("README.md", "gqaconvert/"): "the tree of files",
    ("adding-an-architecture.md", "FAILED tests/"): "seen with a fault planted in a copy",
    ("adding-an-architecture.md", "cannot be converted"): "seen with a file taken away in a copy",
}
"""Page and beginning of blocks that are neither commands nor YAML nor Python, and what they are."""

OTHER_OPTIONS = {"--config_file", "--num_processes", "--cpu", "--use_fsdp", "--no-deps"}
"""Options in running text that are other programs'."""


def rule_for(command: str) -> Rule | None:
    """Return the rule of a command, None where it runs as written."""
    return next((rule for rule in RULES if re.search(rule.pattern, command)), None)


def reason_not_run(command: str) -> str | None:
    """Return why a command is not run, None where it is."""
    return next((rule.reason for rule in NOT_RUN if re.search(rule.pattern, command)), None)
