"""The choices of a response: each is a generation, whose text becomes JSON of OpenAI's API part by part."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from lm.inference.chat_format import ChatFormat
from lm.inference.completion import TextGeneration, TextStream
from lm.inference.sampler import LogitEdits
from textmill.server.chat_answer import ChatAnswer, join_deltas
from textmill.server.logprobs import LogprobsWriter, ScoredToken, TokenNames
from textmill.server.requests import ChatRequest, CompletionRequest
from textmill.server.structured_output import AnswerPlan


class Update(NamedTuple):
    """New text of a choice, or its end."""

    choice: "Choice"
    text: str
    token_count: int
    """Number of tokens generated so far."""
    finish_reason: str | None = None
    error: Exception | None = None


@dataclass(frozen=True)
class ChoiceSettings:
    """What the choices of a response have in common."""

    request: CompletionRequest | ChatRequest
    chat_format: ChatFormat
    plan: AnswerPlan
    edits: LogitEdits
    token_names: TokenNames
    speculative_tokens: int
    has_best_of: bool
    """Whether the most likely completions are chosen among more."""
    put: Callable[[Update], None]
    """Receives the updates, in any thread."""

    @property
    def has_logprobs(self) -> bool:
        """Whether the response has log-probabilities."""
        return self.request.num_alternatives is not None


class Choice:
    """One of the completions of a request."""

    def __init__(self, settings: ChoiceSettings, index: int, prompt: list[int], max_tokens: int, seed: int) -> None:
        request, chat_format, plan = settings.request, settings.chat_format, settings.plan
        self.index = index
        self.is_first_of_prompt = index % request.completions_per_prompt == 0
        self.created_at = time.monotonic()
        self.first_token_at: float | None = None
        self._settings = settings
        self._has_echo = bool(request.echo)
        self._is_started = False
        self._chat: ChatAnswer | None = None
        if isinstance(request, ChatRequest):
            self._chat = ChatAnswer(plan, chat_format, prompt, request.parallel_tool_calls is not False)
        self._stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
        constraint = plan.constraint and plan.constraint.copy()
        sampling = request.sample_config(max_tokens, *(chat_format.stop if self._chat and not plan.has_form else []))
        sampling = replace(sampling, speculative_tokens=settings.speculative_tokens)
        shown_ids = chat_format.find_shown_ids(plan.marks)
        self._text = TextGeneration(
            chat_format.tokenizer, prompt, sampling, seed, self._send, settings.edits, constraint, shown_ids
        )
        self.generation = self._text.generation
        self.generation.stop_ids |= request.find_stop_ids(chat_format.tokenizer)
        self.generation.wants_logprobs = settings.has_logprobs or settings.has_best_of
        self.generation.wants_prompt_logprobs = settings.has_logprobs and self._has_echo
        self.generation.num_alternatives = request.num_alternatives or 0
        self._logprobs = LogprobsWriter(self.generation, settings.token_names, self._chat is not None)

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of the generated tokens and the one that ends them; 0 if there are none."""
        generation = self.generation
        logprobs = [*generation.logprobs, *([generation.end_score[1].logprob] if generation.end_score else [])]
        return sum(logprobs) / max(1, len(logprobs))

    def _send(self, text: str) -> None:
        if self.first_token_at is None:
            self.first_token_at = time.monotonic()
        self._settings.put(Update(self, text, len(self.generation.ids)))

    def finish(self, error: Exception | None) -> None:
        """Send the last update, with the text that was held back."""
        generation = self.generation
        finish_reason = generation.finish_reason or "stop"
        self._settings.put(Update(self, self._text.finish(), len(generation.ids), finish_reason, error))

    def to_json(self, update: Update) -> list[dict[str, Any]]:
        """Return the JSON objects of an update; none if it has nothing to send. Those of a chat without a stream make
        one message."""
        settings, text, tokens = self._settings, update.text, list[ScoredToken]()
        if settings.has_logprobs:
            tokens = self._logprobs.take(None if update.finish_reason else update.token_count)
        if self._has_echo and not self._is_started:
            prompt = TextStream(settings.token_names.text_bytes)
            text = "".join([*map(prompt.add, self.generation.prompt), prompt.finish(), text])
        contents: list[dict[str, Any]] = [{"text": text}] if text else []
        finish_reason = update.finish_reason
        if self._chat:
            contents = self._chat.add(text, is_end=finish_reason is not None)
            finish_reason = "tool_calls" if self._chat.has_calls and finish_reason == "stop" else finish_reason
        is_whole_chat = self._chat is not None and not settings.request.stream
        if is_whole_chat:
            contents = [join_deltas(contents)]
        elif not contents and (finish_reason or tokens):
            contents = [{"content" if self._chat else "text": ""}]
        logprobs = self._logprobs.to_json(tokens) if settings.has_logprobs and contents else None
        results = []
        for number, content in enumerate(contents):
            if self._chat:
                role = {} if self._is_started else {"role": "assistant"}
                content = {"message" if is_whole_chat else "delta": role | content}
            self._is_started = True
            # The tokens of the update come with its first part, its end with the last one.
            empty = self._logprobs.to_json([]) if settings.has_logprobs else None
            scores = logprobs if number == 0 else empty
            reason = finish_reason if number == len(contents) - 1 else None
            results.append({"index": self.index, **content, "logprobs": scores, "finish_reason": reason})
        if finish_reason and self._text.stop_text in self._stops:  # vLLM's field
            results[-1]["stop_reason"] = self._text.stop_text
        return results
