"""A tokenizer in which every letter is a token, so that tests can say which tokens they expect."""

from __future__ import annotations

import string

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>")
BEGIN, END = 0, 1


def make_letters(
    *, begin: bool = True, end: bool = True, chat_template: str | None = None
) -> PreTrainedTokenizerFast:
    """Every printable ASCII character is a token; with `begin`, <s> comes before every text."""
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *string.printable])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    if begin:
        inner.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", BEGIN)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<s>" if begin else None,
        eos_token="</s>" if end else None,
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=chat_template,
    )


def letters(text: str) -> list[int]:
    """Token ids of plain characters."""
    return [len(SPECIAL) + string.printable.index(letter) for letter in text]
