"""Chats: the template's own rendering, and which of its tokens are replies."""

from __future__ import annotations

import pytest
from letter_tokenizer import make_letters

from gqaconvert.errors import UsageError
from gqaconvert.training.chats import check_chats, encode_chat

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ message.content }}<|im_end|>{% endif %}\n{% endfor %}"
)
CHAT = [
    {"role": "system", "content": "Be brief.", "tool_calls": None},
    {"role": "user", "content": "Hi?"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "No."},
]


def _counted(tokenizer, ids, mask):
    return tokenizer.decode([token for token, counts in zip(ids, mask, strict=True) if counts])


def test_whole_chat_is_the_templates_own_tokens():
    tokenizer = make_letters(chat_template=CHATML)
    ids, counted = encode_chat(tokenizer, CHAT, "all", "here")
    assert counted is None
    expected = "".join(
        f"<|im_start|>{each['role']}\n{each['content']}<|im_end|>\n" for each in CHAT
    )
    assert tokenizer.decode(ids) == expected  # no <s> in front, no </s> behind


def test_replies_of_a_template_without_marks_are_found_by_difference():
    tokenizer = make_letters(chat_template=CHATML)
    ids, counted = encode_chat(tokenizer, CHAT, "replies", "here")
    assert _counted(tokenizer, ids, counted) == "Yes.<|im_end|>\nNo.<|im_end|>\n"


def test_marks_of_a_template_are_taken_at_their_word():
    tokenizer = make_letters(chat_template=MARKED)
    ids, counted = encode_chat(tokenizer, CHAT, "replies", "here")
    assert _counted(tokenizer, ids, counted) == "Yes.<|im_end|>No.<|im_end|>"
    assert list(ids) == list(encode_chat(tokenizer, CHAT, "all", "here")[0])


def test_generation_prompt_that_says_more_than_the_reply_is_left_aside():
    thinking = CHATML.replace("assistant\n{% endif", "assistant\n<think>{% endif")
    tokenizer = make_letters(chat_template=thinking)
    ids, counted = encode_chat(tokenizer, CHAT[:3], "replies", "here")
    assert _counted(tokenizer, ids, counted) == "<|im_start|>assistant\nYes.<|im_end|>\n"


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.role if loop.last }}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content }}"
        "{{ '</s>' if loop.last and m.role == 'assistant' }}{% endfor %}",
    ],
)
def test_template_that_renders_the_beginning_otherwise_is_refused(template):
    tokenizer = make_letters(chat_template=template)
    with pytest.raises(UsageError, match="cannot be told from prompts") as refusal:
        encode_chat(tokenizer, CHAT, "replies", "chats.jsonl line 7")
    assert refusal.value.at == "chats.jsonl line 7 message 3"
    assert len(encode_chat(tokenizer, CHAT, "all", "here")[0])


def test_chat_without_replies_gives_nothing_to_learn_from():
    tokenizer = make_letters(chat_template=CHATML)
    assert len(encode_chat(tokenizer, CHAT[:2], "replies", "here")[0]) == 0
    assert len(encode_chat(tokenizer, CHAT[:2], "all", "here")[0]) > 0
    assert len(encode_chat(tokenizer, [], "all", "here")[0]) == 0


def test_what_the_template_refuses_is_said_with_its_place():
    strict = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UsageError, match="roles must alternate") as refusal:
        encode_chat(make_letters(chat_template=strict), CHAT, "all", "chats.jsonl line 3")
    assert refusal.value.at == "chats.jsonl line 3"


def test_keys_that_a_table_filled_in_are_not_there_for_the_template():
    asks = "{% for m in messages %}{{ 'tool' if 'tool_calls' in m else m.content }}{% endfor %}"
    tokenizer = make_letters(chat_template=asks)
    assert tokenizer.decode(encode_chat(tokenizer, CHAT[:1], "all", "here")[0]) == "Be brief."


def test_tokenizer_without_a_template_is_refused():
    with pytest.raises(UsageError, match="no chat template"):
        check_chats(make_letters(), "all", "chats.jsonl")
    check_chats(make_letters(chat_template=CHATML), "replies", "chats.jsonl")
