"""Chats to tokens, through the tokenizer's own template, and which of them are replies.

A template puts the special tokens of its model where they belong; nothing is added to them.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import numpy as np
from jinja2 import TemplateError

from gqaconvert.errors import UsageError
from gqaconvert.training.rows import Chat

Ids = np.ndarray[Any, np.dtype[np.int32]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def check_chats(tokenizer: Any, loss_on: Literal["all", "replies"], at: str) -> None:  # noqa: ANN401
    """Refuse chats that a tokenizer cannot render.

    Raises:
        UsageError: it has no template, or cannot say which tokens are replies.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError(
            "its rows are chats, and the tokenizer has no chat template",
            at=at,
            remedy="the tokenizer of the chat model, or `field` instead of `messages`",
        )
    if loss_on == "replies" and not getattr(tokenizer, "is_fast", False):
        raise UsageError(
            "this tokenizer does not say which characters a token stands for",
            at=at,
            remedy="loss_on: all",
        )


def encode_chat(
    tokenizer: Any,  # noqa: ANN401
    chat: Chat,
    loss_on: Literal["all", "replies"],
    at: str,
) -> tuple[Ids, Mask | None]:
    """Render and tokenise a chat.

    Args:
        tokenizer: of transformers, with a template.
        chat: its messages.
        loss_on: what counts.
        at: where the chat is, for errors.

    Returns:
        Token ids, and which of them count: None for all. Replies are what the template marks by
        `{% generation %}`; of a template without marks, what the assistant's turn adds to the
        prompt for it, the token that ends the turn included. A chat in which nothing counts gives
        no tokens.

    Raises:
        UsageError: the template refuses the chat, or renders its beginning otherwise than the
            whole, so that replies cannot be told.
    """
    if not chat:
        return np.zeros(0, np.int32), None
    if loss_on == "all":
        text = _render(tokenizer, chat, at)
        found = tokenizer(text, add_special_tokens=False, verbose=False)
        return np.asarray(found["input_ids"], np.int32), None
    if _GENERATION.search(tokenizer.get_chat_template()):
        ids, counted = _marked(tokenizer, chat, at)
    else:
        ids, counted = _by_difference(tokenizer, chat, at)
    return (ids, counted) if counted.any() else (ids[:0], None)


def _marked(tokenizer: Any, chat: Chat, at: str) -> tuple[Ids, Mask]:  # noqa: ANN401
    found = _render(
        tokenizer, chat, at, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return (
        np.asarray(found["input_ids"], np.int32),
        np.asarray(found["assistant_masks"], np.bool_),
    )


def _by_difference(tokenizer: Any, chat: Chat, at: str) -> tuple[Ids, Mask]:  # noqa: ANN401
    text = _render(tokenizer, chat, at)
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = np.asarray(found["input_ids"], np.int32)
    begins, ends = np.asarray(found["offset_mapping"], np.int64).reshape(-1, 2).T
    counted = np.zeros(len(ids), np.bool_)
    for turn, message in enumerate(chat):
        if message["role"] == "assistant":
            begin, end = _reply(tokenizer, chat, turn, text, at)
            counted |= (begins < end) & (ends > begin) & (ends > begins)
    return ids, counted


def _reply(tokenizer: Any, chat: Chat, turn: int, text: str, at: str) -> tuple[int, int]:  # noqa: ANN401
    """Characters of `text`, the whole chat, that a turn of the assistant adds."""
    last = turn == len(chat) - 1
    until = text if last else _render(tokenizer, chat[: turn + 1], at)
    if turn == 0:
        prompts = [""]
    else:
        prompts = [_render(tokenizer, chat[:turn], at, add_generation_prompt=True)]
        if not until.startswith(prompts[0]):  # such as a prompt that already opens a thought
            prompts.append(_render(tokenizer, chat[:turn], at))
    prompt = prompts[-1]
    if not (until.startswith(prompt) and text.startswith(until)):
        raise UsageError(
            "the template renders the beginning of a chat otherwise than the whole,"
            " so replies cannot be told from prompts",
            at=f"{at} message {turn + 1}",
            remedy="loss_on: all, or a template with {% generation %} around replies",
        )
    return len(prompt), len(until)


def _render(tokenizer: Any, chat: Chat, at: str, **options: Any) -> Any:  # noqa: ANN401
    try:
        return tokenizer.apply_chat_template(chat, **{"tokenize": False, **options})
    except (TemplateError, TypeError, ValueError, KeyError, IndexError) as error:
        raise UsageError(
            f"the chat template refuses it: {error}",
            at=at,
            remedy='messages such as {"role": "user", "content": "Hi"}, in the order it expects',
        ) from error
