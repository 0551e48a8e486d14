"""Responses of OpenAI's API: the generated text of a request, as one JSON body or as a stream of events."""

import asyncio
import random
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from lm.inference.chat_format import ChatFormat
from lm.inference.constraints import ConstraintError
from lm.inference.scheduler import SchedulerClosed
from textmill.server.choices import Choice, ChoiceSettings, Update
from textmill.server.logprobs import TokenNames
from textmill.server.requests import ApiError, ChatRequest, CompletionRequest
from textmill.server.structured_output import AnswerPlan


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
        speculative_tokens: int,
        plan: AnswerPlan,
        cuts_at_context: bool = False,
        is_limited: bool = False,
    ) -> None:
        self.request = request
        self._count, self._generated_count = request.n or 1, request.completions_per_prompt  # for each prompt
        self._has_best_of = self._generated_count > self._count
        self._settings = ChoiceSettings(
            request,
            chat_format,
            plan,
            request.logit_edits(chat_format.tokenizer.size),
            token_names,
            speculative_tokens,
            self._has_best_of,
            self._put,
        )
        self.has_logprobs, is_chat = self._settings.has_logprobs, isinstance(request, ChatRequest)
        self._prompt_tokens = sum(map(len, prompts))
        self._loop, self._updates = asyncio.get_running_loop(), asyncio.Queue[Update]()
        seed = random.randrange(1 << 63) if request.seed is None else request.seed
        repeated_prompts = [prompt for prompt in prompts for _ in range(self._generated_count)]
        limits = [
            _max_tokens(request, len(prompt), context_length, cuts_at_context, is_limited)
            for prompt in repeated_prompts
        ]
        self.choices = [
            Choice(self._settings, index, prompt, limit, (seed + index) % (1 << 63))
            for index, (prompt, limit) in enumerate(zip(repeated_prompts, limits, strict=True))
        ]
        self._header = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": f"chat.completion{'.chunk' if request.stream else ''}" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": request.model,
        }

    def _put(self, update: Update) -> None:
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
        first_choices = self.choices[:: self._generated_count]  # a prompt counts once
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

    async def whole(self) -> dict[str, Any]:
        """Return the JSON body when it is complete. Raise ApiError if the model fails."""
        texts: dict[Choice, str] = dict.fromkeys(self.choices, "")
        last_updates: dict[Choice, Update] = {}
        async for update in self._iterate_updates():
            texts[update.choice] += update.text
            last_updates[update.choice] = update
        updates = {choice: update._replace(text=texts[choice]) for choice, update in last_updates.items()}
        return await asyncio.to_thread(self._write, updates)  # many log-probabilities take long

    def _write(self, updates: dict[Choice, Update]) -> dict[str, Any]:
        choices = [part for choice in self._best_choices() for part in choice.to_json(updates[choice])]
        return {**self._header, "choices": choices, "usage": self._usage()}

    def _best_choices(self) -> list[Choice]:
        """Return the choices of the response. With best_of, they are the most likely of each prompt."""
        if not self._has_best_of:
            return self.choices
        best = []
        for start in range(0, len(self.choices), self._generated_count):
            group = self.choices[start : start + self._generated_count]
            best += sorted(group, key=lambda choice: -choice.mean_logprob)[: self._count]
        for index, choice in enumerate(best):
            choice.index = index
        return best

    async def chunks(self, has_running_usage: bool = False) -> AsyncIterator[dict[str, Any]]:
        """Yield the JSON bodies of a stream, with the usage so far if it ``has_running_usage``. Raise ApiError if the
        model fails."""
        has_usage = (
            not has_running_usage
            and self.request.stream_options is not None
            and bool(self.request.stream_options.include_usage)
        )
        async for update in self._iterate_updates():
            if self.has_logprobs:
                choices = await asyncio.to_thread(update.choice.to_json, update)  # a prompt's take long
            else:
                choices = update.choice.to_json(update)
            usage: dict[str, Any] = {"usage": None} if has_usage else {}
            if has_running_usage:
                usage = {"usage": self._usage()}
            for choice in choices:
                yield {**self._header, "choices": [choice], **usage}
        if has_usage:
            yield {**self._header, "choices": [], "usage": self._usage()}


def _max_tokens(
    request: CompletionRequest | ChatRequest,
    prompt_tokens: int,
    context_length: int,
    cuts_at_context: bool,
    is_limited: bool,
) -> int:
    """Return the maximum number of tokens to generate.

    Raise ApiError if they do not fit into the context, or if they are fewer than the minimum; if it
    ``cuts_at_context``, only if none fits.
    """
    is_chat, max_tokens = isinstance(request, ChatRequest), request.max_tokens
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        max_tokens = request.max_completion_tokens
    free_tokens = context_length - prompt_tokens
    if cuts_at_context and max_tokens is not None:
        max_tokens = max(1, min(max_tokens, free_tokens))
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
