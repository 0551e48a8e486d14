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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lm.common.errors import UserError
from lm.data.chat_template import encode_chat_prompt, find_template
from lm.data.dialogs import Message
from lm.hardware.device import explain_out_of_memory
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


class ChatFormat:
    """The form of dialogs for the model of a tokenizer.

    It is the chat template of the model, see :func:`lm.data.chat_template.find_template`. A model without one gets the
    plain format.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        self._chat_tokenizer = tokenizer if isinstance(tokenizer, Tokenizer) and find_template(tokenizer) else None
        self.has_template = self._chat_tokenizer is not None
        self.stop = [] if self.has_template else [PLAIN_STOP]
        """Texts that end an answer. In a template, a token ends it."""

    def encode(self, messages: Sequence[Message], *, continues: bool = False, **variables: Any) -> list[int]:
        """Return the prompt's ids for the answer to ``messages``; or for the rest of the last message if it
        ``continues``. ``variables`` are those of the template, such as ``tools``.

        Raises UserError if the template refuses the dialog, or if there is none for ``variables``.
        """
        if self._chat_tokenizer:
            return encode_chat_prompt(self._chat_tokenizer, messages, continues=continues, **variables)
        if variables:
            raise UserError(f"The model has no chat template, so it cannot use {', '.join(variables)}.")
        text = render_plain(messages[:-1]) + f" {messages[-1]['content']}" if continues else render_plain(messages)
        return encode_prompt(self.tokenizer, text)


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
