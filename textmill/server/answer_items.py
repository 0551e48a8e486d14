"""The items of an answer: pieces of text, reasoning and calls of a chat, gathered as other APIs list them.

A chat of OpenAI's API has the parts of an answer in fields of one message. Others have a list of items, each of which
begins, grows and ends in a stream.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["text", "reasoning", "call"]


@dataclass
class AnswerItem:
    """One item: its text, or the arguments of a call."""

    kind: Kind
    index: int
    text: str = ""
    call: Mapping[str, Any] = field(default_factory=dict)
    """Of a call: ``id`` and ``name``."""


@dataclass(frozen=True)
class ItemEvent:
    """An item begins, grows by a text, or ends."""

    kind: Literal["begin", "text", "end"]
    item: AnswerItem
    text: str = ""


class AnswerItems:
    """Gathers the items of one answer from deltas or the message of a chat."""

    def __init__(self) -> None:
        self.items: list[AnswerItem] = []

    def add(self, delta: Mapping[str, Any]) -> Iterator[ItemEvent]:
        """Add a delta, or a whole message, and yield what it changes."""
        if reasoning := delta.get("reasoning_content"):
            yield from self._extend("reasoning", reasoning)
        if content := delta.get("content"):
            yield from self._extend("text", content)
        for call in delta.get("tool_calls") or []:
            function = call["function"]
            if "id" in call:
                yield from self._begin("call", {"id": call["id"], "name": function["name"]})
            if arguments := function["arguments"]:
                yield from self._extend("call", arguments)

    def finish(self) -> Iterator[ItemEvent]:
        """Yield the end of the last item. An answer with nothing has an empty text."""
        if not self.items:
            yield from self._begin("text", {})
        yield ItemEvent("end", self.items[-1])

    def _extend(self, kind: Kind, text: str) -> Iterator[ItemEvent]:
        if not self.items or self.items[-1].kind != kind:
            yield from self._begin(kind, {})
        item = self.items[-1]
        item.text += text
        yield ItemEvent("text", item, text)

    def _begin(self, kind: Kind, call: Mapping[str, Any]) -> Iterator[ItemEvent]:
        if self.items:
            yield ItemEvent("end", self.items[-1])
        self.items.append(AnswerItem(kind, len(self.items), "", call))
        yield ItemEvent("begin", self.items[-1])
