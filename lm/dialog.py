"""A dialog as plain text, for models that have no format of their own for one.

Each message is a line, or more, of its own that begins with who speaks; the text ends where the model is to speak:

    System: You are kind.
    User: Hello!
    Assistant: Hi.
    User: How are you?
    Assistant:

The model's answer ends before the next ``User:`` line. A user who writes such a line himself speaks for the others:
there are no tokens that only the program can write.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

STOP = "\nUser:"
"""The text that ends an answer, and is not part of it."""


class Message(NamedTuple):
    """What one side said."""

    role: Literal["system", "user", "assistant"]
    content: str


def render(messages: Sequence[Message]) -> str:
    """The prompt for the answer that follows ``messages``."""
    return "".join(f"{one.role.capitalize()}: {one.content.strip()}\n" for one in messages) + "Assistant:"


class Answer:
    """An answer's text as it comes, without the space that follows the prompt's colon."""

    def __init__(self) -> None:
        self.text = ""

    def add(self, piece: str) -> str:
        """What of ``piece`` belongs to the answer."""
        piece = piece if self.text else piece.lstrip()
        self.text += piece
        return piece
