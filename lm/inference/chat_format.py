"""How a model gets a dialog, and its responses to many prompts.

A model gets a dialog in the chat template that it was trained on, or else as plain text. The plain format has no
special tokens, so a user who types ``Assistant:`` on a new line can imitate the other side:

    System: You are kind.
    User: Hello!
    Assistant: Hi.
    User: How are you?
    Assistant:

The model's answer ends before the next ``User:`` line.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

from lm.common.errors import UserError
from lm.data.chat_template import NO_VARIABLES, encode_chat_prompt, find_template
from lm.data.dialogs import Message
from lm.data.jinja_template import ChatTemplate
from lm.hardware.device import explain_out_of_memory
from lm.inference.answer_parser import REASONING_BEGIN, REASONING_END, AnswerMarks
from lm.inference.call_form import NO_TOOLS, CallForm, find_call_form, has_reasoning
from lm.inference.completion import OUT_OF_MEMORY, TextGeneration, check_vocabulary, encode_prompt
from lm.inference.config import SampleConfig
from lm.inference.engine import generate_each
from lm.inference.generation_request import Generation
from lm.model.transformer import TransformerLM
from lm.tokenizer.text_tokenizer import TextTokenizer
from lm.tokenizer.tokenizer import Tokenizer

PLAIN_STOP = "\nUser:"
PLAIN_NOTICE = (
    "This model has no chat template. It gets the dialog as lines of plain text, so its answers may not fit; fine-tune "
    "it to chat."
)
_MAX_BATCH_SIZE = 32
_TAIL_LENGTH = 16  # tokens of a prompt in which its last mark is


class ChatFormat:
    """The form of dialogs for the model of a tokenizer.

    It is the chat template of the model, see :func:`lm.data.chat_template.find_template`. A model without one gets the
    plain format.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        self._template: ChatTemplate | None = find_template(tokenizer) if isinstance(tokenizer, Tokenizer) else None
        self.has_template = self._template is not None
        self.stop = [] if self.has_template else [PLAIN_STOP]
        """Texts that end an answer. In a template, a token ends it."""

    def encode(
        self, messages: Sequence[Message], variables: Mapping[str, Any] = NO_VARIABLES, *, continues: bool = False
    ) -> list[int]:
        """Return the prompt's ids for the answer to ``messages``; or for the rest of the last message if it
        ``continues``. ``variables`` are those of the template, such as ``tools``.

        Raises UserError if the template refuses the dialog, or if there is none for ``variables``.
        """
        if self._template and variables and self._template.is_own:
            raise UserError(f"textmill's own chat template cannot use {', '.join(variables)}.")
        if self._template:
            dialog = [self._adapt_calls(message) if message.get("tool_calls") else message for message in messages]
            return encode_chat_prompt(cast(Tokenizer, self.tokenizer), dialog, variables, continues=continues)
        if variables:
            raise UserError(f"The model has no chat template, so it cannot use {', '.join(variables)}.")
        if any(message["role"] == "tool" or message.get("tool_calls") for message in messages):
            raise UserError("The model has no chat template, so a dialog cannot have calls of tools.")
        text = render_plain(messages[:-1]) + f" {messages[-1]['content']}" if continues else render_plain(messages)
        return encode_prompt(self.tokenizer, text)

    @cached_property
    def _call_form(self) -> CallForm | UserError:
        try:
            form = find_call_form(self._template) if self._template else None
        except UserError as error:
            return error
        if form is None:
            return UserError(NO_TOOLS)
        specials = self.tokenizer.special_ids
        return replace(form, other_marks=tuple(mark for mark in form.other_marks if mark in specials))

    def require_call_form(self) -> CallForm:
        """Return the form of calls of tools. Raises UserError if the model's template has none that can be read."""
        if isinstance(self._call_form, UserError):
            raise self._call_form
        return self._call_form

    def find_marks(self, tools: Iterable[str] = ()) -> AnswerMarks:
        """Return what an answer can hold besides content; with ``tools``, calls of them.

        Raises UserError as :meth:`require_call_form` does.
        """
        reasons = self._template is not None and has_reasoning(self._template)
        names = [*tools]
        return self.require_call_form().marks(reasons, names) if names else AnswerMarks(reasons)

    def find_shown_ids(self, marks: AnswerMarks) -> frozenset[int]:
        """Return the ids of special tokens that are a part of the text of an answer, because they are marks."""
        texts = [*marks.call_begins, marks.call_end]
        texts += [REASONING_BEGIN, REASONING_END] if marks.has_reasoning else []
        return frozenset(self.tokenizer.special_ids[text] for text in texts if text in self.tokenizer.special_ids)

    def is_in_reasoning(self, prompt: Sequence[int]) -> bool:
        """Return whether the template has begun the reasoning of the answer to ``prompt``."""
        return self.has_template and self.tokenizer.decode(prompt[-_TAIL_LENGTH:]).rstrip().endswith(REASONING_BEGIN)

    def end_reasoning(self, prompt: Sequence[int]) -> list[int]:
        """Return the ids of a prompt; if its template has begun the reasoning, it ends without a word."""
        if not (self.is_in_reasoning(prompt) and isinstance(self.tokenizer, Tokenizer)):
            return [*prompt]
        return [*prompt, *self.tokenizer.encode(f"\n{REASONING_END}\n\n")]

    def _adapt_calls(self, message: Message) -> Message:
        """Return a message with its calls as the template takes them."""
        if isinstance(form := self._call_form, UserError):
            return message  # the template may render it though
        calls = [call["function"] for call in message["tool_calls"]]
        if not form.writes_calls:
            content = "\n".join(filter(None, (message["content"], form.write(calls))))
            return cast(Message, {**message, "content": content, "tool_calls": []})
        if not form.has_text_arguments:
            return message
        texts = [json.dumps(call["arguments"], ensure_ascii=False) for call in calls]
        functions = [{**call, "arguments": text} for call, text in zip(calls, texts, strict=True)]
        pairs = zip(message["tool_calls"], functions, strict=True)
        return cast(Message, {**message, "tool_calls": [{**call, "function": function} for call, function in pairs]})


class Answer:
    """Collects an answer. In the plain format, white space after ``Assistant:`` is not a part of it."""

    def __init__(self, chat_format: ChatFormat) -> None:
        self._has_template = chat_format.has_template
        self.text = ""

    def add(self, piece: str) -> str:
        """Append a piece of the model's output, and return its part of the answer."""
        piece = piece if self.text or self._has_template else piece.lstrip()
        self.text += piece
        return piece


def render_plain(messages: Sequence[Message]) -> str:
    """Return the prompt for the answer to ``messages`` in the plain format."""
    lines = [f"{message['role'].capitalize()}: {message['content'].strip()}\n" for message in messages]
    return "".join(lines) + "Assistant:"


@dataclass(frozen=True)
class ModelResponse:
    """The response to a numbered prompt."""

    index: int
    text: str
    num_tokens: int
    finish_reason: str


def respond(
    model: TransformerLM,
    tokenizer: TextTokenizer,
    prompts: Sequence[tuple[int, str | Sequence[Message]]],
    config: SampleConfig,
) -> Iterator[ModelResponse]:
    """Yield the response to each numbered prompt as soon as it is complete.

    A text is continued; a dialog is answered in the model's chat format. A response ends before a special token, a text
    of ``config.stop``, after ``config.max_new_tokens``, or at the end of the context. Prompt i has the seed
    ``config.seed`` + i, so a response does not depend on the other prompts. Raises UserError if a prompt leaves no room
    in the context, before anything is computed.
    """
    check_vocabulary(model, tokenizer.size)
    chat_format = ChatFormat(tokenizer)
    by_generation: dict[Generation, tuple[int, bool, TextGeneration]] = {}
    for index, prompt in prompts:
        is_chat = not isinstance(prompt, str)
        ids = encode_prompt(tokenizer, prompt) if isinstance(prompt, str) else chat_format.encode(prompt)
        room = model.config.context_length - len(ids)
        if room <= 0:
            raise UserError(
                f"Prompt {index} has {len(ids)} tokens and leaves no room for a response in the model's context of "
                f"{model.config.context_length}. Use fewer or shorter examples, or a model with a longer context."
            )
        stop = [*config.stop, *chat_format.stop] if is_chat else config.stop
        sampling = replace(config, max_new_tokens=min(config.max_new_tokens, room), stop=stop, prompts=[])
        text_generation = TextGeneration(tokenizer, ids, sampling, config.seed + index)
        by_generation[text_generation.generation] = index, is_chat, text_generation
    with explain_out_of_memory(OUT_OF_MEMORY):
        for generation in generate_each(model, list(by_generation), _MAX_BATCH_SIZE):
            index, is_chat, text_generation = by_generation[generation]
            text = Answer(chat_format).add(text_generation.finish()) if is_chat else text_generation.finish()
            yield ModelResponse(index, text, len(generation.ids), generation.finish_reason or "stop")
