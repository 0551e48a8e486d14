"""What clients of ``textmill serve`` get: texts as they are drawn, in OpenAI's shapes.

Log-probabilities are those of the tokens drawn, those of a stop text included, and with ``echo`` of the prompt's.
"""

import asyncio
import json
import random
import time
import uuid
from collections import ChainMap
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from flows.wanted import Chat, Completion, Refused
from lm import dialog
from lm.completion import TextStream, text_generation
from lm.tokenizer import Tokenizer

_COMPLETION_TOKENS = 16  # OpenAI's default; an answer in a chat may by default go on to the context's end


class Event(NamedTuple):
    """More text of a choice, and how many ids it has now; or its end."""

    choice: "Choice"
    text: str
    drawn: int
    finish: str | None = None
    error: Exception | None = None


class Choice:
    """One of the completions of a request, and how much of it has gone out."""

    def __init__(self, reply: "Reply", index: int, prompt: list[int], max_tokens: int, seed: int) -> None:
        self._reply, self._index = reply, index
        self._wants_logprobs = isinstance(reply.wanted, Completion) and reply.wanted.logprobs is not None
        self._wants_echo = isinstance(reply.wanted, Completion) and bool(reply.wanted.echo)
        self._is_begun = False
        self._answer = dialog.Answer()
        self._told = self._place = 0  # ids, and characters of their text
        silent = dict.fromkeys(reply.tokenizer.special_ids.values(), b"")
        self._token_bytes = ChainMap(silent, reply.tokenizer.vocab)
        self._characters = TextStream(self._token_bytes)
        stops = [dialog.STOP] if reply.is_chat else []
        self.generation, self._text = text_generation(
            reply.tokenizer,
            prompt,
            reply.wanted.sampling(max_tokens, *stops),
            seed,
            lambda text: reply.put(Event(self, text, len(self.generation.ids))),
            self._wants_logprobs,
        )

    def end(self, error: Exception | None) -> None:
        """Tell the reply, with the text that was held back."""
        one = self.generation
        self._reply.put(Event(self, self._text.finish(), len(one.ids), one.ended or "stop", error))

    def part(self, event: Event) -> dict[str, Any] | None:
        """What goes out; None where an event has nothing to tell."""
        text, one = event.text, self.generation
        ids = one.ids[self._told : event.drawn]
        logprobs: list[float | None] = [*one.logprobs[self._told : event.drawn]]
        self._told = event.drawn
        if self._wants_echo and not self._is_begun:
            prompt = TextStream(self._token_bytes)
            text = "".join([*map(prompt.add, one.prompt), prompt.finish(), text])
            ids, logprobs = [*one.prompt, *ids], [None, *one.prompt_logprobs, *logprobs]
        if self._reply.is_chat:
            text = self._answer.add(text)
        if not (text or event.finish or (ids and self._wants_logprobs)):
            return None
        content: dict[str, Any] = {"text": text}
        if self._reply.is_chat:
            role = {} if self._is_begun else {"role": "assistant"}
            content = {"delta" if self._reply.wanted.stream else "message": role | {"content": text}}
        self._is_begun = True
        told = self._logprobs(ids, logprobs) if self._wants_logprobs else None
        return {"index": self._index, **content, "logprobs": told, "finish_reason": event.finish}

    def _logprobs(self, ids: list[int], logprobs: list[float | None]) -> dict[str, Any]:
        offsets = []
        for token_id in ids:
            offsets.append(self._place)
            self._place += len(self._characters.add(token_id))
        tokens = [self._reply.tokenizer.decode([token_id]) for token_id in ids]
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": offsets}


class Reply:
    """What a request is answered with: its choices side by side, as they come. To be made in an event loop; raises
    Refused where the model's ``context`` is too short for a prompt and what shall follow."""

    def __init__(self, wanted: Completion | Chat, prompts: list[list[int]], tokenizer: Tokenizer, context: int) -> None:
        self.wanted, self.tokenizer = wanted, tokenizer
        self.is_chat = isinstance(wanted, Chat)
        self._prompt_tokens = sum(map(len, prompts))
        self._loop, self._queue = asyncio.get_running_loop(), asyncio.Queue[Event]()
        first = random.randrange(1 << 63) if wanted.seed is None else wanted.seed
        every = [prompt for prompt in prompts for _ in range(wanted.n or 1)]
        self.choices = [
            Choice(self, index, prompt, _max_tokens(wanted, len(prompt), context), (first + index) % (1 << 63))
            for index, prompt in enumerate(every)
        ]
        self._head = {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": f"chat.completion{'.chunk' if wanted.stream else ''}" if self.is_chat else "text_completion",
            "created": int(time.time()),
            "model": wanted.model,
        }

    def put(self, event: Event) -> None:
        """Tell of an event, from any thread."""
        self._loop.call_soon_threadsafe(self._queue.put_nowait, event)

    async def _events(self) -> AsyncIterator[Event]:
        left = len(self.choices)
        while left:
            event = await self._queue.get()
            if event.error:
                raise Refused(500, "The model failed; the server's log says how.")
            left -= event.finish is not None
            yield event

    def _usage(self) -> dict[str, int]:
        drawn = sum(len(choice.generation.ids) for choice in self.choices)
        total = self._prompt_tokens + drawn
        return {"prompt_tokens": self._prompt_tokens, "completion_tokens": drawn, "total_tokens": total}

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece; raises Refused where the model fails."""
        texts: dict[Choice, str] = dict.fromkeys(self.choices, "")
        ends: dict[Choice, Event] = {}
        async for event in self._events():
            texts[event.choice] += event.text
            ends[event.choice] = event
        parts = [choice.part(ends[choice]._replace(text=texts[choice])) for choice in self.choices]
        return {**self._head, "choices": parts, "usage": self._usage()}

    async def stream(self) -> AsyncIterator[str]:
        """The answer as server-sent events."""
        wants_usage = self.wanted.stream_options is not None and self.wanted.stream_options.include_usage
        try:
            async for event in self._events():
                if part := event.choice.part(event):
                    yield _line({**self._head, "choices": [part], **({"usage": None} if wants_usage else {})})
            if wants_usage:
                yield _line({**self._head, "choices": [], "usage": self._usage()})
        except Refused as refused:
            yield _line(refused.body)
        yield "data: [DONE]\n\n"


def _line(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


def _max_tokens(wanted: Completion | Chat, prompt_tokens: int, context: int) -> int:
    """The most tokens to draw; raises Refused where they do not fit behind the prompt."""
    is_chat, given = isinstance(wanted, Chat), wanted.max_tokens
    if isinstance(wanted, Chat) and wanted.max_completion_tokens is not None:
        given = wanted.max_completion_tokens
    room = context - prompt_tokens
    if room < (given or 0):
        more = f" and {given} more are asked for" if given else ""
        message = f"The prompt has {prompt_tokens} tokens{more}; the model's context has {context}."
        raise Refused(400, message, "messages" if is_chat else "prompt", "context_length_exceeded")
    return given if given is not None else room if is_chat else min(room, _COMPLETION_TOKENS)
