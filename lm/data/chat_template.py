"""Chat templates: dialogs as token ids. A model has its own template, or that of this project:

    <|system|>You are kind.<|end|><|user|>Hello!<|end|><|assistant|>Hi.<|end|>

The text of special tokens in a message is plain text, whatever a user writes: only the template itself writes special
tokens.
"""

import json
import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from lm.common.errors import UserError
from lm.data.dialog_writer import DialogWriter, split_generations
from lm.data.dialogs import Message, find_role_problem
from lm.data.jinja_template import ChatTemplate, render, render_foreign
from lm.tokenizer.chat_settings import ChatSettings

if TYPE_CHECKING:
    from lm.tokenizer.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Row = TypeVar("Row")
Encoded = TypeVar("Encoded")

ROLE_TOKENS = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
END_TOKEN = "<|end|>"
CHAT_TOKENS = (*ROLE_TOKENS.values(), END_TOKEN)
NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})
TRAINING_DAY = "2026-01-01"  # for templates that write today's date: the same data give the same ids on each day


@dataclass(frozen=True)
class EncodedExample:
    """Token ids to train on, and for each whether the model learns to predict it."""

    ids: list[int]
    is_target: list[bool]


class TemplatePart(NamedTuple):
    """A part of a dialog in a template: special tokens, or other text."""

    text: str
    is_special: bool
    is_target: bool


def split_dialog(messages: Sequence[Message]) -> Iterator[TemplatePart]:
    """Yield the parts of a dialog in the template of this project, without a tokenizer."""
    for message in messages:
        is_learned = message["role"] == "assistant" and message.get("weight") != 0
        yield TemplatePart(ROLE_TOKENS[message["role"]], True, False)
        yield TemplatePart(message["content"], False, is_learned)
        yield TemplatePart(END_TOKEN, True, is_learned)


def add_chat_tokens(tokenizer: "Tokenizer") -> "Tokenizer":
    """Return the tokenizer to train dialogs with: one with the special tokens of this project's template at the end of
    its vocabulary, so that existing ids stay.

    A model with a template of its own keeps it. The token that the template writes after an answer then ends a
    generation, also if the model's files do not name it. Raises UserError if there is no such token, or if one of this
    project's is an ordinary token, which plain text could become.
    """
    from lm.tokenizer.tokenizer import Tokenizer  # slow to import: numba

    if (template := find_template(tokenizer)) and not template.is_own:
        chat, end_id = tokenizer.chat or ChatSettings(), written_end_id(tokenizer)
        if end_id in tokenizer.stop_ids:
            return tokenizer
        return Tokenizer(*tokenizer.parts._replace(chat=replace(chat, end_ids=(*chat.end_ids, end_id))))
    ordinary = set(tokenizer.vocab.values()) - {token.encode() for token in tokenizer.special_tokens}
    if taken := [token for token in CHAT_TOKENS if token.encode() in ordinary]:
        raise UserError(
            f"The vocabulary has {taken[0]} as an ordinary token, so any text could imitate the chat template; "
            "use a tokenizer without it."
        )
    new_tokens = [token for token in CHAT_TOKENS if token not in tokenizer.special_ids]
    parts = tokenizer.parts
    # Without the settings of a base model: each special token ends a generation.
    return Tokenizer(*parts._replace(special_tokens=[*parts.special_tokens, *new_tokens], chat=None))


def find_template(tokenizer: "Tokenizer") -> ChatTemplate | None:
    """Return the template of the model that a tokenizer belongs to: its own, or this project's if the tokenizer has the
    special tokens. None if the model has not learned to chat."""
    sources = tokenizer.chat.templates if tokenizer.chat else {}
    if all(token in tokenizer.special_ids for token in CHAT_TOKENS):
        own = make_jinja_template(tokenizer)
        if sources.get("default", own) == own:
            return ChatTemplate({"default": own}, {}, render)
    if tokenizer.chat and "default" in sources:
        return ChatTemplate(sources, tokenizer.chat.tokens, render_foreign)
    return None


def find_end_ids(tokenizer: "Tokenizer") -> frozenset[int]:
    """Return the ids that end an answer in the template of the tokenizer."""
    template = find_template(tokenizer)
    return frozenset([tokenizer.special_ids[END_TOKEN]]) if template and template.is_own else tokenizer.stop_ids


def written_end_id(tokenizer: "Tokenizer") -> int:
    """Return the id that the template of the tokenizer writes after an answer. Raises UserError if it writes no special
    or added token there."""
    dialog = [
        Message(role="user", content="?"),
        Message(role="assistant", content="!"),
        Message(role="user", content="?"),
    ]
    if (template := find_template(tokenizer)) and template.is_own:
        return tokenizer.special_ids[END_TOKEN]
    writer = DialogWriter(tokenizer, _check(tokenizer, dialog[:2], is_answered=True), dialog, {})
    text, _, end = writer.find_content(1)
    added = frozenset(tokenizer.added_ids.values())
    if (end_id := next((token for token in writer.encode(text[end:]) if token in added), None)) is None:
        raise UserError(
            "The chat template of the model ends an answer without a special token, so nothing would end the answers "
            "of a trained model. Use a model with another template."
        )
    return end_id


def encode_dialog(
    tokenizer: "Tokenizer", messages: Sequence[Message], variables: Mapping[str, Any] = NO_VARIABLES
) -> EncodedExample:
    """Return the ids of a dialog that ends with the assistant. The targets are its answers and their end tokens, but
    not those of answers with the weight 0. ``variables`` are those of the template, such as ``tools``.

    An answer begins where the template lets the model begin it, and ends with the first token that ends a generation,
    or where the next message begins. A template with ``{% generation %}`` says itself where answers are. Raises
    UserError if the template refuses the dialog, if it does not show where an answer is, or if there is no template.
    """
    template = _check(tokenizer, messages, is_answered=True)
    if template.is_own:
        return _encode_parts(tokenizer, messages)
    writer = DialogWriter(tokenizer, template, messages, variables, TRAINING_DAY)
    text, spans = split_generations(writer.write(len(messages)))
    ids = writer.encode(text)
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if spans and len(spans) != len(answers):
        raise UserError(f"The chat template marks {len(spans)} answers of a dialog with {len(answers)}.")
    ends = [*accumulate(len(tokenizer.vocab[token_id]) for token_id in ids)]  # in bytes
    is_target = [False] * len(ids)
    end_ids = find_end_ids(tokenizer)
    for place, number in enumerate(answers):
        if messages[number].get("weight") == 0:
            continue
        start = text[: spans[place][0]] if spans else writer.write_before(text, number)
        first = bisect_right(ends, writer.count_bytes(start))
        if spans:
            end = bisect_right(ends, writer.count_bytes(text[: spans[place][1]]))
        else:
            limit = bisect_right(ends, writer.count_bytes(writer.write_limit(text, number)))
            end = next((token + 1 for token in range(first, limit) if ids[token] in end_ids), None) or bisect_right(
                ends, writer.count_bytes(writer.write_through(text, number))
            )
        is_target[first:end] = [True] * (end - first)
    return EncodedExample(ids, is_target)


def encode_chat_prompt(
    tokenizer: "Tokenizer",
    messages: Sequence[Message],
    variables: Mapping[str, Any] = NO_VARIABLES,
    *,
    continues: bool = False,
    day: str | None = None,
) -> list[int]:
    """Return the ids of a dialog up to the place where the assistant's answer begins; if it ``continues`` an answer,
    the dialog ends with the assistant and the ids end within its message. ``variables`` are those of the template.

    A template that writes the date writes ``day``, in ISO's form, and today's by default. Raises UserError if the
    template refuses the dialog, or if there is no template.
    """
    template = _check(tokenizer, messages, is_answered=continues)
    if template.is_own:
        answered = messages if continues else [*messages, Message(role="assistant", content="")]
        return _encode_parts(tokenizer, answered).ids[:-1]
    writer = DialogWriter(tokenizer, template, messages, variables, day)
    if continues:
        text, _, end = writer.find_content(len(messages) - 1)
        return writer.encode(text[:end])
    return writer.encode(writer.write(len(messages), add_generation_prompt=True))


def encode_answer(
    tokenizer: "Tokenizer", messages: Sequence[Message], variables: Mapping[str, Any] = NO_VARIABLES
) -> tuple[list[int], list[int]]:
    """Return the ids of a dialog up to its last answer, and those of the answer with its end, as a model writes it.

    Raises UserError as :func:`encode_dialog` does.
    """
    template = _check(tokenizer, messages, is_answered=True)
    if template.is_own:
        prompt_ids = encode_chat_prompt(tokenizer, messages[:-1])
        return prompt_ids, _encode_parts(tokenizer, messages).ids[len(prompt_ids) :]
    writer = DialogWriter(tokenizer, template, messages, variables, TRAINING_DAY)
    text, _ = split_generations(writer.write(len(messages)))
    prompt = writer.write_before(text, len(messages) - 1)
    answer = writer.encode(text[len(prompt) :])
    ends = [place for place, token_id in enumerate(answer) if token_id in find_end_ids(tokenizer)]
    return writer.encode(prompt), answer[: ends[0] + 1] if ends else answer


def _encode_parts(tokenizer: "Tokenizer", messages: Sequence[Message]) -> EncodedExample:
    """Return what the template of this project makes of a dialog, without Jinja, which takes four times as long."""
    ids: list[int] = []
    is_target: list[bool] = []
    for text, is_special, is_learned in split_dialog(messages):
        part = [tokenizer.special_ids[text]] if is_special else tokenizer.encode(text, allowed_special=())
        ids += part
        is_target += [is_learned] * len(part)
    return EncodedExample(ids, is_target)


def encode_rows(rows: Iterable[Row], encode: Callable[[Row], Encoded]) -> list[tuple[Row, Encoded]]:
    """Return the rows that the template takes, each with what ``encode`` makes of it. The others are left out, with one
    warning for all. Raises UserError if it takes none."""
    taken: list[tuple[Row, Encoded]] = []
    refused: list[tuple[int, UserError]] = []
    for number, row in enumerate(rows, start=1):
        try:
            taken.append((row, encode(row)))
        except UserError as error:
            refused.append((number, error))
    if refused and not taken:
        raise refused[0][1]
    if refused:
        total, (first, problem) = len(taken) + len(refused), refused[0]
        message = "%d of %d rows do not fit the chat template and are left out. Row %d: %s"
        log.warning(message, len(refused), total, first, problem)
    return taken


def make_jinja_template(tokenizer: "Tokenizer") -> str:
    """Return the template of this project as Hugging Face's ``chat_template``.

    ``apply_chat_template`` then gives the same ids. It encodes special tokens in a message as such, so the template
    raises an error for a message that holds one, and for an unknown role.
    """
    return _make_jinja_template(tuple(tokenizer.special_tokens))


@lru_cache(maxsize=8)
def _make_jinja_template(special_tokens: tuple[str, ...]) -> str:
    specials = ", ".join(json.dumps(token, ensure_ascii=False) for token in special_tokens)
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


def _check(tokenizer: "Tokenizer", messages: Sequence[Message], is_answered: bool) -> ChatTemplate:
    """Return the template. Roles and their order are those of a model's own template."""
    if (template := find_template(tokenizer)) is None:
        raise UserError("The tokenizer has no chat template: its model was not trained to chat. Fine-tune it first.")
    if template.is_own and (problem := find_role_problem(messages, "assistant" if is_answered else "user")):
        raise UserError(f"The dialog: {problem}.")
    return template
