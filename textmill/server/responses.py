"""Responses of OpenAI's API: the generated text of a request, as one JSON body or as a stream of events."""

import asyncio
import json
import random
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, NamedTuple

from fastapi.responses import JSONResponse, Response

from lm.inference.chat_format import Answer, ChatFormat
from lm.inference.completion import TextGeneration, TextStream
from lm.inference.constraints import Constraint, ConstraintError
from lm.inference.scheduler import SchedulerClosed
from textmill.server.logprobs import LogprobsWriter, ScoredToken, TokenNames
from textmill.server.requests import ApiError, ChatRequest, CompletionRequest


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
        request, chat_format, is_chat = response.request, response.chat_format, response.is_chat
        self.index = index
        self.is_first_of_prompt = index % response.generated_count == 0
        self.created_at = time.monotonic()
        self.first_token_at: float | None = None
        self._response = response
        self._has_echo = bool(request.echo)
        self._is_started = False
        self._answer = Answer(chat_format)
        constraint = response.constraint and response.constraint.copy()
        sampling = request.sample_config(max_tokens, *(chat_format.stop if is_chat and not constraint else []))
        sampling = replace(sampling, speculative_tokens=response.speculative_tokens)
        self._text = TextGeneration(
            chat_format.tokenizer, prompt, sampling, seed, self._send, response.edits, constraint
        )
        self.generation = self._text.generation
        self.generation.stop_ids |= request.find_stop_ids(chat_format.tokenizer)
        self.generation.wants_logprobs = response.has_logprobs or response.has_best_of
        self.generation.wants_prompt_logprobs = response.has_logprobs and self._has_echo
        self.generation.num_alternatives = request.num_alternatives or 0
        self._logprobs = LogprobsWriter(self.generation, response.token_names, is_chat)

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of the generated tokens and the one that ends them; 0 if there are none."""
        generation = self.generation
        logprobs = [*generation.logprobs, *([generation.end_score[1].logprob] if generation.end_score else [])]
        return sum(logprobs) / max(1, len(logprobs))

    def _send(self, text: str) -> None:
        if self.first_token_at is None:
            self.first_token_at = time.monotonic()
        self._response.put(Update(self, text, len(self.generation.ids)))

    def finish(self, error: Exception | None) -> None:
        """Send the last update, with the text that was held back."""
        generation = self.generation
        finish_reason = generation.finish_reason or "stop"
        self._response.put(Update(self, self._text.finish(), len(generation.ids), finish_reason, error))

    def to_json(self, update: Update) -> dict[str, Any] | None:
        """Return the JSON object of an update, or None if it has nothing to send."""
        response, text, tokens = self._response, update.text, list[ScoredToken]()
        if response.has_logprobs:
            tokens = self._logprobs.take(None if update.finish_reason else update.token_count)
        if self._has_echo and not self._is_started:
            prompt = TextStream(response.token_names.text_bytes)
            text = "".join([*map(prompt.add, self.generation.prompt), prompt.finish(), text])
        if response.is_chat and not response.constraint:
            text = self._answer.add(text)
        if not (text or update.finish_reason or tokens):
            return None
        content: dict[str, Any] = {"text": text}
        if response.is_chat:
            role = {} if self._is_started else {"role": "assistant"}
            content = {"delta" if response.request.stream else "message": role | {"content": text}}
        self._is_started = True
        logprobs = self._logprobs.to_json(tokens) if response.has_logprobs else None
        return {"index": self.index, **content, "logprobs": logprobs, "finish_reason": update.finish_reason}


class GenerationResponse:
    """The response to a request: its choices, generated side by side. Create it in an event loop.

    Raises ApiError if a prompt and its completion are longer than ``context_length``, the model's context or, if it
    ``is_limited``, the server's.
    """

    def __init__(
        self,
        request: CompletionRequest | ChatRequest,
        prompts: list[list[int]],
        chat_format: ChatFormat,
        token_names: TokenNames,
        context_length: int,
        speculative_tokens: int = 0,
        constraint: Constraint | None = None,
        is_limited: bool = False,
    ) -> None:
        self.speculative_tokens, self.constraint = speculative_tokens, constraint
        self.request, self.chat_format, self.token_names = request, chat_format, token_names
        self.edits = request.logit_edits(chat_format.tokenizer.size)
        self._count, self.generated_count = request.n or 1, request.completions_per_prompt  # for each prompt
        self.has_best_of = self.generated_count > self._count
        self.has_logprobs = request.num_alternatives is not None
        self.is_chat = isinstance(request, ChatRequest)
        self._prompt_tokens = sum(map(len, prompts))
        self._loop, self._updates = asyncio.get_running_loop(), asyncio.Queue[Update]()
        seed = random.randrange(1 << 63) if request.seed is None else request.seed
        repeated_prompts = [prompt for prompt in prompts for _ in range(self.generated_count)]
        limits = [_max_tokens(request, len(prompt), context_length, is_limited) for prompt in repeated_prompts]
        self.choices = [
            Choice(self, index, prompt, limit, (seed + index) % (1 << 63))
            for index, (prompt, limit) in enumerate(zip(repeated_prompts, limits, strict=True))
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
            if isinstance(update.error, SchedulerClosed):
                raise ApiError(503, "The server is stopping.")
            if isinstance(update.error, ConstraintError):
                raise ApiError(400, str(update.error))
            if update.error:
                raise ApiError(500, "The model failed; see the server's log.")
            unfinished -= update.finish_reason is not None
            yield update

    def _usage(self) -> dict[str, Any]:
        completion_tokens = sum(len(choice.generation.ids) for choice in self.choices)
        first_choices = self.choices[:: self.generated_count]  # a prompt counts once
        cached_tokens = sum(choice.generation.num_cached_tokens for choice in first_choices)
        guessed, accepted = (
            sum(getattr(choice.generation, name) for choice in self.choices)
            for name in ("num_draft_tokens", "num_accepted_tokens")
        )
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self._prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": guessed - accepted,
            },
        }

    async def whole(self) -> Response:
        """Return the whole response when it is complete. Raise ApiError if the model fails."""
        texts: dict[Choice, str] = dict.fromkeys(self.choices, "")
        last_updates: dict[Choice, Update] = {}
        async for update in self._iterate_updates():
            texts[update.choice] += update.text
            last_updates[update.choice] = update
        updates = {choice: update._replace(text=texts[choice]) for choice, update in last_updates.items()}
        return await asyncio.to_thread(self._render, updates)  # many log-probabilities take long

    def _render(self, updates: dict[Choice, Update]) -> Response:
        choices = [choice.to_json(updates[choice]) for choice in self._best_choices()]
        return JSONResponse({**self._header, "choices": choices, "usage": self._usage()})

    def _best_choices(self) -> list[Choice]:
        """Return the choices of the response. With best_of, they are the most likely of each prompt."""
        if not self.has_best_of:
            return self.choices
        best = []
        for start in range(0, len(self.choices), self.generated_count):
            group = self.choices[start : start + self.generated_count]
            best += sorted(group, key=lambda choice: -choice.mean_logprob)[: self._count]
        for index, choice in enumerate(best):
            choice.index = index
        return best

    async def events(self) -> AsyncIterator[str]:
        """Yield the response as server-sent events."""
        has_usage = self.request.stream_options is not None and bool(self.request.stream_options.include_usage)
        try:
            async for update in self._iterate_updates():
                if self.has_logprobs:
                    chunk = await asyncio.to_thread(self._chunk, update, has_usage)  # a prompt's take long
                else:
                    chunk = self._chunk(update, has_usage)
                if chunk:
                    yield chunk
            if has_usage:
                yield _event({**self._header, "choices": [], "usage": self._usage()})
        except ApiError as error:
            yield _event(error.body)
        yield "data: [DONE]\n\n"

    def _chunk(self, update: Update, has_usage: bool) -> str:
        """Return the event of an update; an empty text if it has nothing to send."""
        if (choice := update.choice.to_json(update)) is None:
            return ""
        return _event({**self._header, "choices": [choice], **({"usage": None} if has_usage else {})})


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


def _max_tokens(
    request: CompletionRequest | ChatRequest, prompt_tokens: int, context_length: int, is_limited: bool
) -> int:
    """Return the maximum number of tokens to generate.

    Raise ApiError if they do not fit into the context, or if they are fewer than the minimum.
    """
    is_chat, max_tokens = isinstance(request, ChatRequest), request.max_tokens
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        max_tokens = request.max_completion_tokens
    free_tokens = context_length - prompt_tokens
    if free_tokens < (1 if max_tokens is None else max_tokens):
        requested = f" and {max_tokens} more are requested" if max_tokens else ""
        limit = "this server takes at most" if is_limited else "the model's context has"
        message = f"The prompt has {prompt_tokens} tokens{requested}; {limit} {context_length}."
        room = {"max_tokens": free_tokens} if free_tokens > 0 else {}  # not OpenAI's; textmill's clients read it
        raise ApiError(400, message, "messages" if is_chat else "prompt", "context_length_exceeded", **room)
    if max_tokens is None:
        max_tokens = free_tokens if is_chat else min(free_tokens, 16)  # OpenAI's default
    if (request.min_tokens or 0) > max_tokens:
        message = f"min_tokens is {request.min_tokens}, but at most {max_tokens} tokens are generated; see max_tokens."
        raise ApiError(400, message, "min_tokens")
    return max_tokens
