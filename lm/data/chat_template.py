"""The chat template: dialogs as token ids, with special tokens that mark who speaks.

    <|system|>You are kind.<|end|><|user|>Hello!<|end|><|assistant|>Hi.<|end|>

Content is encoded on its own as plain text, so no message can hold these tokens, whatever a user writes.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from lm.common.errors import UserError
from lm.data.dialogs import Message, find_role_problem

if TYPE_CHECKING:
    from lm.tokenizer.tokenizer import Tokenizer

ROLE_TOKENS = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
END_TOKEN = "<|end|>"
CHAT_TOKENS = (*ROLE_TOKENS.values(), END_TOKEN)


@dataclass(frozen=True)
class EncodedExample:
    """Token ids to train on, and for each whether the model learns to predict it."""

    ids: list[int]
    is_target: list[bool]


class TemplatePart(NamedTuple):
    """A part of a dialog in the template: a special token, or the content of a message."""

    text: str
    is_special: bool
    is_target: bool


def split_dialog(messages: Sequence[Message]) -> Iterator[TemplatePart]:
    """Yield the parts of a dialog. The targets are the answers and their end tokens, without those of weight 0."""
    for message in messages:
        is_learned = message["role"] == "assistant" and message.get("weight") != 0
        yield TemplatePart(ROLE_TOKENS[message["role"]], True, False)
        yield TemplatePart(message["content"], False, is_learned)
        yield TemplatePart(END_TOKEN, True, is_learned)


def add_chat_tokens(tokenizer: "Tokenizer") -> "Tokenizer":
    """Return a tokenizer with the template's special tokens at the end of its vocabulary. Existing ids stay.

    Raises UserError if one of them is an ordinary token, which plain text could become.
    """
    from lm.tokenizer.tokenizer import Tokenizer  # slow to import: numba

    ordinary = set(tokenizer.vocab.values()) - {token.encode() for token in tokenizer.special_tokens}
    if taken := [token for token in CHAT_TOKENS if token.encode() in ordinary]:
        raise UserError(
            f"The vocabulary has {taken[0]} as an ordinary token, so any text could imitate the chat template; "
            "use a tokenizer without it."
        )
    new_tokens = [token for token in CHAT_TOKENS if token not in tokenizer.special_ids]
    parts = tokenizer.parts
    return Tokenizer(*parts._replace(special_tokens=[*parts.special_tokens, *new_tokens]))


def has_chat_tokens(tokenizer: "Tokenizer") -> bool:
    """Return whether the tokenizer has all special tokens of the template."""
    return all(token in tokenizer.special_ids for token in CHAT_TOKENS)


def encode_dialog(tokenizer: "Tokenizer", messages: Sequence[Message]) -> EncodedExample:
    """Return the ids of a dialog that ends with the assistant. The targets are its answers and their end tokens, but
    not those of answers with the weight 0.

    Raises UserError if the roles are out of order or the tokenizer lacks the template's tokens.
    """
    _check(tokenizer, messages, is_answered=True)
    ids: list[int] = []
    is_target: list[bool] = []
    for text, is_special, is_learned in split_dialog(messages):
        part = [tokenizer.special_ids[text]] if is_special else tokenizer.encode(text, allowed_special=())
        ids += part
        is_target += [is_learned] * len(part)
    return EncodedExample(ids, is_target)


def encode_chat_prompt(tokenizer: "Tokenizer", messages: Sequence[Message]) -> list[int]:
    """Return the ids of a dialog that ends with the user, up to the token that starts the assistant's answer.

    Raises UserError if the roles are out of order or the tokenizer lacks the template's tokens.
    """
    _check(tokenizer, messages, is_answered=False)
    answered = encode_dialog(tokenizer, [*messages, Message(role="assistant", content="")])
    return answered.ids[:-1]


def make_jinja_template(tokenizer: "Tokenizer") -> str:
    """Return the template as Hugging Face's ``chat_template``.

    ``apply_chat_template`` then gives the same ids. It encodes special tokens in a message as such, so the template
    raises an error for a message that holds one, and for an unknown role.
    """
    specials = ", ".join(json.dumps(token, ensure_ascii=False) for token in tokenizer.special_tokens)
    return (
        "{%- for message in messages %}"
        f"{{%- if message['role'] not in {list(ROLE_TOKENS)} %}}"
        "{{- raise_exception('The role must be system, user or assistant, not ' + message['role']) }}"
        "{%- endif %}"
        f"{{%- for token in [{specials}] %}}"
        "{%- if token in message['content'] %}"
        "{{- raise_exception('A message holds the special token ' + token) }}"
        "{%- endif %}{%- endfor %}"
        "{{- '<|' + message['role'] + '|>' + message['content'] + '" + END_TOKEN + "' }}"
        "{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '" + ROLE_TOKENS["assistant"] + "' }}{%- endif %}"
    )


def _check(tokenizer: "Tokenizer", messages: Sequence[Message], is_answered: bool) -> None:
    if not has_chat_tokens(tokenizer):
        raise UserError("The tokenizer has no chat template: its model was not trained to chat. Fine-tune it first.")
    if problem := find_role_problem(messages, "assistant" if is_answered else "user"):
        raise UserError(f"The dialog: {problem}.")
