"""The answer to a chat as deltas or a message of OpenAI's API: content, reasoning, and calls of tools.

Sources: https://platform.openai.com/docs/api-reference/chat; ``reasoning_content`` is that of vLLM and DeepSeek.
"""

import secrets
import string
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from lm.inference.answer_parser import AnswerParser, AnswerPart
from lm.inference.chat_format import Answer, ChatFormat
from textmill.server.structured_output import AnswerPlan

_ID_CHARACTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9  # Mistral's templates take no others


class ChatAnswer:
    """One answer. ``prompt`` has the ids of its prompt. Without ``allows_several``, calls after the first are left
    out."""

    def __init__(self, plan: AnswerPlan, chat_format: ChatFormat, prompt: Sequence[int], allows_several: bool) -> None:
        self._plain = None if plan.has_form else Answer(chat_format)
        in_reasoning = plan.marks.has_reasoning and chat_format.is_in_reasoning(prompt)
        self._parser = AnswerParser(plan.marks, is_in_reasoning=in_reasoning, streams_arguments=plan.has_certain_calls)
        self._allows_several = allows_several
        self._num_calls = 0

    @property
    def has_calls(self) -> bool:
        """Whether there is a call so far."""
        return self._num_calls > 0

    def add(self, text: str, is_end: bool) -> list[dict[str, Any]]:
        """Append a piece of the model's output, and return the deltas that are certain now."""
        parts = self._parser.add(self._plain.add(text) if self._plain else text)
        if is_end:
            parts += self._parser.finish()
        return [*self._write_deltas(parts)]

    def _write_deltas(self, parts: Sequence[AnswerPart]) -> Iterator[dict[str, Any]]:
        for kind, group in groupby(parts, key=lambda part: part.kind):
            for text in [part.text for part in group] if kind == "name" else ["".join(part.text for part in group)]:
                if kind == "content":
                    yield {"content": text}
                elif kind == "reasoning":
                    yield {"reasoning_content": text}
                else:
                    self._num_calls += kind == "name"
                    if self._num_calls == 1 or self._allows_several:
                        yield {"tool_calls": [self._write_call(kind == "name", text)]}

    def _write_call(self, is_begin: bool, text: str) -> dict[str, Any]:
        index = self._num_calls - 1
        if not is_begin:
            return {"index": index, "function": {"arguments": text}}
        call_id = "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH))
        return {"index": index, "id": call_id, "type": "function", "function": {"name": text, "arguments": ""}}


def join_deltas(deltas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the message of all deltas of an answer. Beside calls, its content is null if it is empty."""
    content, reasoning = (
        "".join(delta[name] for delta in deltas if name in delta) for name in ("content", "reasoning_content")
    )
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        for call in delta.get("tool_calls", []):
            if "id" in call:
                calls.append({"id": call["id"], "type": call["type"], "function": {**call["function"]}})
            else:
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    message: dict[str, Any] = {"content": content or None if calls else content}
    if reasoning:
        message["reasoning_content"] = reasoning
    return {**message, "tool_calls": calls} if calls else message
