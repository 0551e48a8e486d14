"""Responses of OpenAI's API: the generated text of a request, as one JSON body or as a stream of events.

Log-probabilities cover the generated tokens, including those of a stop text, and with ``echo`` the prompt's tokens.
"""

import asyncio
import json
import random
import time
import uuid
from collections import ChainMap
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from flows.server.requests import ApiError, ChatRequest, CompletionRequest, GenerationRequest
from lm.inference.chat_format import Answer, ChatFormat
from lm.inference.completion import TextStream, create_text_generation

_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default; a chat answer may by default fill the context


class Update(NamedTuple):
    """New text of a choice, or its end."""

    choice: "Choice"
    text: str
    token_count: int
    """Number of tokens generated so far."""
    finish_reason: str | None = None
    error: Exception | None = None


class Choice:
    """One of the completions of a request."""

    def __init__(
        self, response: "GenerationResponse", index: int, prompt: list[int], max_tokens: int, seed: int
    ) -> None:
        request = response.request
        self._response, self._index = response, index
        self._has_logprobs = isinstance(request, CompletionRequest) and request.logprobs is not None
        self._has_echo = isinstance(request, CompletionRequest) and bool(request.echo)
        self._is_started = False
        self._answer = Answer(response.chat_format)
        self._sent_tokens = 0
        self._text_offset = 0
        tokenizer = response.chat_format.tokenizer
        special_tokens = dict.fromkeys(tokenizer.special_ids.values(), b"")  # they have no text
        self._token_bytes = ChainMap(special_tokens, tokenizer.vocab)
        self._offset_stream = TextStream(self._token_bytes)
        self.generation, self._text = create_text_generation(
            tokenizer,
            prompt,
            request.sample_config(max_tokens, *(response.chat_format.stop if response.is_chat else [])),
            seed,
            lambda text: response.put(Update(self, text, len(self.generation.ids))),
            self._has_logprobs,
        )

    def finish(self, error: Exception | None) -> None:
        """Send the last update, with the text that was held back."""
        generation = self.generation
        finish_reason = generation.finish_reason or "stop"
        self._response.put(Update(self, self._text.finish(), len(generation.ids), finish_reason, error))

    def to_json(self, update: Update) -> dict[str, Any] | None:
        """Return the JSON object of an update, or None if it has nothing to send."""
        text, generation = update.text, self.generation
        ids = generation.ids[self._sent_tokens : update.token_count]
        logprobs: list[float | None] = [*generation.logprobs[self._sent_tokens : update.token_count]]
        self._sent_tokens = update.token_count
        if self._has_echo and not self._is_started:
            prompt = TextStream(self._token_bytes)
            text = "".join([*map(prompt.add, generation.prompt), prompt.finish(), text])
            ids, logprobs = [*generation.prompt, *ids], [None, *generation.prompt_logprobs, *logprobs]
        if self._response.is_chat:
            text = self._answer.add(text)
        if not (text or update.finish_reason or (ids and self._has_logprobs)):
            return None
        content: dict[str, Any] = {"text": text}
        if self._response.is_chat:
            role = {} if self._is_started else {"role": "assistant"}
            content = {"delta" if self._response.request.stream else "message": role | {"content": text}}
        self._is_started = True
        logprobs_json = self._logprobs_to_json(ids, logprobs) if self._has_logprobs else None
        return {"index": self._index, **content, "logprobs": logprobs_json, "finish_reason": update.finish_reason}

    def _logprobs_to_json(self, ids: list[int], logprobs: list[float | None]) -> dict[str, Any]:
        offsets = []
        for token_id in ids:
            offsets.append(self._text_offset)
            self._text_offset += len(self._offset_stream.add(token_id))
        tokens = [self._response.chat_format.tokenizer.decode([token_id]) for token_id in ids]
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": offsets}


class GenerationResponse:
    """The response to a request: its choices, generated side by side. Create it in an event loop.

    Raises ApiError if the model's context is too short for a prompt and its completion.
    """

    def __init__(
        self, request: GenerationRequest, prompts: list[list[int]], chat_format: ChatFormat, context_length: int
    ) -> None:
        self.request, self.chat_format = request, chat_format
        self.is_chat = isinstance(request, ChatRequest)
        self._prompt_tokens = sum(map(len, prompts))
        self._loop, self._updates = asyncio.get_running_loop(), asyncio.Queue[Update]()
        seed = random.randrange(1 << 63) if request.seed is None else request.seed
        repeated_prompts = [prompt for prompt in prompts for _ in range(request.n or 1)]
        self.choices = [
            Choice(self, index, prompt, _max_tokens(request, len(prompt), context_length), (seed + index) % (1 << 63))
            for index, prompt in enumerate(repeated_prompts)
        ]
        self._header = {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": f"chat.completion{'.chunk' if request.stream else ''}" if self.is_chat else "text_completion",
            "created": int(time.time()),
            "model": request.model,
        }

    def put(self, update: Update) -> None:
        """Add an update. Any thread may call this."""
        self._loop.call_soon_threadsafe(self._updates.put_nowait, update)

    async def _iterate_updates(self) -> AsyncIterator[Update]:
        unfinished = len(self.choices)
        while unfinished:
            update = await self._updates.get()
            if update.error:
                raise ApiError(500, "The model failed; see the server's log.")
            unfinished -= update.finish_reason is not None
            yield update

    def _usage(self) -> dict[str, int]:
        completion_tokens = sum(len(choice.generation.ids) for choice in self.choices)
        total = self._prompt_tokens + completion_tokens
        return {"prompt_tokens": self._prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}

    async def body(self) -> dict[str, Any]:
        """Return the whole response when it is complete. Raise ApiError if the model fails."""
        texts: dict[Choice, str] = dict.fromkeys(self.choices, "")
        last_updates: dict[Choice, Update] = {}
        async for update in self._iterate_updates():
            texts[update.choice] += update.text
            last_updates[update.choice] = update
        choices = [choice.to_json(last_updates[choice]._replace(text=texts[choice])) for choice in self.choices]
        return {**self._header, "choices": choices, "usage": self._usage()}

    async def events(self) -> AsyncIterator[str]:
        """Yield the response as server-sent events."""
        has_usage = self.request.stream_options is not None and self.request.stream_options.include_usage
        try:
            async for update in self._iterate_updates():
                if choice := update.choice.to_json(update):
                    yield _event({**self._header, "choices": [choice], **({"usage": None} if has_usage else {})})
            if has_usage:
                yield _event({**self._header, "choices": [], "usage": self._usage()})
        except ApiError as error:
            yield _event(error.body)
        yield "data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


def _max_tokens(request: GenerationRequest, prompt_tokens: int, context_length: int) -> int:
    """Return the maximum number of tokens to generate. Raise ApiError if they do not fit into the context."""
    is_chat, max_tokens = isinstance(request, ChatRequest), request.max_tokens
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        max_tokens = request.max_completion_tokens
    free_tokens = context_length - prompt_tokens
    if free_tokens < (max_tokens or 0):
        requested = f" and {max_tokens} more are requested" if max_tokens else ""
        message = f"The prompt has {prompt_tokens} tokens{requested}; the model's context has {context_length}."
        raise ApiError(400, message, "messages" if is_chat else "prompt", "context_length_exceeded")
    if max_tokens is not None:
        return max_tokens
    return free_tokens if is_chat else min(free_tokens, _DEFAULT_COMPLETION_TOKENS)
