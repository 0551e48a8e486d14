"""How a model gets a dialog: in the chat template that it was trained on, or else as plain text.

The plain format has no special tokens, so a user who types ``Assistant:`` on a new line can imitate the other side:

    System: You are kind.
    User: Hello!
    Assistant: Hi.
    User: How are you?
    Assistant:

The model's answer ends before the next ``User:`` line.
"""

from collections.abc import Sequence

from lm.data.chat_template import encode_chat_prompt, has_chat_tokens
from lm.data.dialogs import Message
from lm.inference.completion import encode_prompt
from lm.tokenizer.text_tokenizer import TextTokenizer
from lm.tokenizer.tokenizer import Tokenizer

PLAIN_STOP = "\nUser:"
PLAIN_NOTICE = (
    "This model was not trained on textmill's chat template. It gets the dialog as lines of plain text, so its answers "
    "may not fit; fine-tune it to chat."
)


class ChatFormat:
    """The form of dialogs for the model of a tokenizer.

    A tokenizer with the special tokens of :mod:`lm.data.chat_template` belongs to a model that was trained on that
    template. Other models get the plain format.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        self._chat_tokenizer = tokenizer if isinstance(tokenizer, Tokenizer) and has_chat_tokens(tokenizer) else None
        self.has_template = self._chat_tokenizer is not None
        self.stop = [] if self.has_template else [PLAIN_STOP]
        """Texts that end an answer. In the template, a special token ends it."""

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Return the prompt's ids for the answer to ``messages``.

        Raises UserError if the template requires another order of roles.
        """
        if self._chat_tokenizer:
            return encode_chat_prompt(self._chat_tokenizer, messages)
        return encode_prompt(self.tokenizer, render_plain(messages))


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
