"""The one place that knows lm-eval: runs its tasks on a loaded model, or through vLLM.

A task is a name that lm-eval knows, `continuation` (bundled, offline), or a YAML file of one's own,
whose `data_files` are looked for beside it.
"""

from __future__ import annotations

import io
import logging
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

from gqaconvert.errors import GqaconvertError, UsageError
from gqaconvert.evaluation.results import Measurement, library_versions
from gqaconvert.modelling.models import LoadedModel, ModelFolder

BUNDLED_TASKS = Path(__file__).resolve().parent.parent / "bundled" / "tasks"
"""Tasks that work offline: YAML files, called by their stem."""

BACKENDS = ("hf", "vllm")

_PREFERRED = ("acc_norm", "acc", "exact_match", "f1", "word_perplexity")
_SEED = 1234


def measure_task(
    model: LoadedModel | ModelFolder,
    task: str,
    *,
    settings: Mapping[str, Any],
    backend: str = "hf",
    dtype: str = "auto",
    num_fewshot: int | None = None,
    limit: int | None = None,
    batch_size: int = 1,
    max_length: int | None = None,
) -> Measurement:
    """Run one task, with fixed seeds and the same settings for every model.

    Args:
        model: loaded for "hf"; where its files are for "vllm", which loads it itself.
        task: a name or a YAML file.
        settings: recorded as they are.
        backend: one of `BACKENDS`.
        dtype: of the weights under "vllm".
        num_fewshot: examples shown first; what the task says by default.
        limit: examples to run, the first ones; all by default.
        batch_size: examples at a time.
        max_length: tokens of context at most; what the model was made for by default.

    Raises:
        UsageError: no such task or backend.
        GqaconvertError: the task cannot run: its data are out of reach, an engine is missing.
    """
    specification, is_local = _find_task(task)
    with _quiet_lm_eval():
        engine = _engine(model, backend, dtype, batch_size, max_length)
        found = _run(engine, specification, is_local, task, num_fewshot, limit)
    name = next(iter(found["results"]))
    metrics = found["results"][name]
    chosen = _primary(metrics)
    samples = found.get("samples", {})
    examples = sum(len(each) for each in samples.values())
    return Measurement(
        metric=f"task/{task_label(task)}",
        value=float(metrics[chosen]),
        stderr=_number(metrics.get(_stderr_key(chosen))),
        n=examples,
        unit="",
        settings=dict(settings),
        versions=library_versions("lm-eval", *(["vllm"] if backend == "vllm" else [])),
        weights_sha256=model.weights_sha256,
        detail={
            "score": chosen.partition(",")[0],
            "chance": _chance(samples) if chosen.startswith("acc") else None,
            "all": {key: value for key, value in metrics.items() if _number(value) is not None},
            "shots": dict(found.get("n-shot", {})),
            "task_versions": {key: str(value) for key, value in found["versions"].items()},
        },
    )


def task_label(task: str) -> str:
    """Return a task's short name: that of the file for a YAML of one's own."""
    return Path(task).stem if task.endswith((".yaml", ".yml")) else task


def _find_task(task: str) -> tuple[str | dict[str, Any], bool]:
    """Return what lm-eval is given, and whether that needs none of its own tasks."""
    path = Path(task).expanduser()
    if not task.endswith((".yaml", ".yml")):
        path = BUNDLED_TASKS / f"{task}.yaml"
        if not path.is_file():
            return task, False
    elif not path.is_file():
        raise UsageError("no such task file", at=task)
    from lm_eval.tasks._yaml_loader import load_yaml

    try:
        specification: dict[str, Any] = load_yaml(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"not a task: {error}", at=str(path)) from error
    if "task" not in specification:
        raise UsageError("a task file needs the key `task`", at=str(path))
    files = (specification.get("dataset_kwargs") or {}).get("data_files")
    if files is not None:
        specification["dataset_kwargs"]["data_files"] = _beside(path.resolve().parent, files)
    return specification, True


def _beside(folder: Path, files: Any) -> Any:  # noqa: ANN401
    """Make names of files absolute, in the shapes that `datasets` takes."""
    if isinstance(files, str):
        return files if "://" in files else str(folder / files)
    if isinstance(files, list):
        return [_beside(folder, each) for each in files]
    return {split: _beside(folder, each) for split, each in files.items()}


def _engine(
    model: LoadedModel | ModelFolder,
    backend: str,
    dtype: str,
    batch_size: int,
    max_length: int | None,
) -> Any:  # noqa: ANN401
    if backend == "hf":
        from lm_eval.models.huggingface import HFLM

        if isinstance(model, ModelFolder):
            raise UsageError("the hf backend needs the model loaded", at=model.name)
        return HFLM(
            pretrained=model.model,
            tokenizer=model.tokenizer,
            batch_size=batch_size,
            max_length=max_length,
        )
    if backend != "vllm":
        raise UsageError(f"unknown backend {backend!r}", remedy=", ".join(BACKENDS))
    try:
        from lm_eval.models.vllm_causallms import VLLM

        return VLLM(
            pretrained=str(model.folder),
            dtype=dtype,
            batch_size=batch_size,
            max_model_len=max_length,
            seed=_SEED,
        )
    except (ImportError, RuntimeError) as error:  # lm-eval raises the first, the engine the second
        raise GqaconvertError(
            f"vLLM cannot be used here: {_first_line(error)}",
            remedy="install vllm on a machine with a GPU, or --backend hf",
        ) from error


def _run(
    engine: Any,  # noqa: ANN401
    specification: str | dict[str, Any],
    is_local: bool,
    task: str,
    num_fewshot: int | None,
    limit: int | None,
) -> Any:  # noqa: ANN401
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    # Its own tasks are some 15,000 files to index; a local one needs none of them.
    manager = TaskManager(include_defaults=not is_local)
    if isinstance(specification, str) and specification not in manager.all_tasks:
        raise UsageError(
            f"lm-eval knows no task {task!r}",
            remedy=_nearest(task, [*manager.all_tasks, *bundled_tasks()]),
        )
    try:
        return simple_evaluate(
            model=engine,
            tasks=[specification],
            task_manager=manager,
            num_fewshot=num_fewshot,
            limit=limit,
            log_samples=True,
            random_seed=_SEED,
            numpy_random_seed=_SEED,
            torch_random_seed=_SEED,
            fewshot_random_seed=_SEED,
        )
    # Data out of reach (datasets: OSError and its kind), a broken task (the others).
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
        raise GqaconvertError(
            f"task {task!r} cannot run: {type(error).__name__}: {_first_line(error)}",
            remedy="fetch its data first where there is no network, or --tasks continuation",
        ) from error


def bundled_tasks() -> list[str]:
    """Names of the tasks that ship with this package."""
    return sorted(path.stem for path in BUNDLED_TASKS.glob("*.yaml"))


def _primary(metrics: Mapping[str, Any]) -> str:
    """Return the key of the score to show, such as "acc_norm,none"."""
    scores = [
        key
        for key, value in metrics.items()
        if "," in key and "_stderr" not in key and _number(value) is not None
    ]
    if not scores:
        raise GqaconvertError("the task gave no score", at=", ".join(map(str, metrics)))
    for name in _PREFERRED:
        for key in scores:
            if key.partition(",")[0] == name:
                return key
    return scores[0]


def _stderr_key(key: str) -> str:
    name, _, filtered = key.partition(",")
    return f"{name}_stderr,{filtered}"


def _chance(samples: Mapping[str, Any]) -> float | None:
    """Return the accuracy of guessing: one over the number of choices, averaged over examples."""
    choices = [len(sample["arguments"]) for each in samples.values() for sample in each]
    if not choices or min(choices) < 2:
        return None
    return math.fsum(1 / count for count in choices) / len(choices)


def _number(value: Any) -> float | None:  # noqa: ANN401
    """Return a figure; lm-eval writes "N/A" where it has none."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _nearest(name: str, known: list[str]) -> str:
    import difflib

    return " or ".join(difflib.get_close_matches(name, known, 3)) or "lm-eval ls tasks"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextmanager
def _quiet_lm_eval() -> Iterator[None]:
    """Silence lm-eval and datasets, which tell much on stderr; errors become ours."""
    import datasets
    from lm_eval import evaluator

    loggers = [logging.getLogger(name) for name in ("lm_eval", "lm-eval", "datasets", "evaluate")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    bars = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    # It asks git, which complains outside of a repository; the commit of the user's is no matter.
    ask_git, evaluator.get_git_commit_hash = evaluator.get_git_commit_hash, lambda: None
    shown = sys.stderr if sys.stderr.isatty() else io.StringIO()  # bars are for terminals
    try:
        with redirect_stderr(shown):
            yield
    finally:
        evaluator.get_git_commit_hash = ask_git
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if bars:
            datasets.enable_progress_bars()
