"""Which transformers class a checkpoint is of, and how to load it without noise."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, AutoModelForCausalLM

FORWARD_THROUGH = {"Llama4ForConditionalGeneration": "language_model"}
"""Composite classes whose own forward fails without an image in transformers 5.24."""


def model_class(folder: Path) -> Any:  # noqa: ANN401
    """Return the class that config.json names, or the one that picks a causal model's class."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    for name in getattr(config, "architectures", None) or []:
        if hasattr(transformers, name):
            return getattr(transformers, name)
    return AutoModelForCausalLM


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers, whose loading reports become errors of ours."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR + 1)
    shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        logger.setLevel(level)
        if shown:
            transformers.utils.logging.enable_progress_bar()
