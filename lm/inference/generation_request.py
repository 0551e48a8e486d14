"""A request to continue a prompt, with settings of its own, and its result so far."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from lm.inference.config import SampleConfig
from lm.inference.constraints import Constraint
from lm.inference.sampler import LogitEdits, TokenScore


@dataclass(eq=False)
class Generation:
    """A request to continue a prompt, and its result so far."""

    prompt: Sequence[int]
    """At least one id."""
    max_new_tokens: int
    sampling: SampleConfig = field(default_factory=SampleConfig)
    stop_ids: frozenset[int] = frozenset()
    """Each of these ids ends the generation and is not part of the result."""
    seed: int = 0
    edits: LogitEdits = field(default_factory=LogitEdits)
    constraint: Constraint | None = None
    """Decides which ids are possible, one of its own for each generation; ``stop_ids`` where the text may end."""
    wants_logprobs: bool = False
    """Whether ``logprobs`` are computed."""
    wants_prompt_logprobs: bool = False
    """Whether ``prompt_logprobs`` are computed."""
    num_alternatives: int = 0
    """Number of most likely tokens that are reported beside each log-probability."""
    adapter: int = 0
    """Number of the adapter to compute with; 0: the base alone. See :mod:`lm.inference.served_adapters`."""
    on_token: Callable[[int], bool] = lambda token_id: False
    """Called with each new id; True ends the generation after it."""
    ids: list[int] = field(default_factory=list)
    """The new ids."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probability, in nats, of each of ``ids`` under the model."""
    alternatives: list[list[tuple[int, float]]] = field(default_factory=list)
    """For each of ``ids`` the most likely ids in its place and their log-probabilities, the most likely first."""
    end_score: tuple[int, TokenScore] | None = None
    """The stop id that ended the generation, and its score. None without one, and without ``wants_logprobs``."""
    prompt_logprobs: list[float] = field(default_factory=list)
    """Log-probabilities of the prompt's ids, except the first."""
    prompt_alternatives: list[list[tuple[int, float]]] = field(default_factory=list)
    """``alternatives`` for the prompt's ids, except the first."""
    window_start: int = 0
    """Index in ``prompt`` + ``ids`` of the first token that the next one depends on. It grows past the context."""
    is_prefilled: bool = False
    """Whether the prompt was computed."""
    num_cached_tokens: int = 0
    """Number of the prompt's tokens that were in the prefix cache."""
    num_draft_tokens: int = 0
    """Number of draft tokens of speculative decoding."""
    num_accepted_tokens: int = 0
    """Number of draft tokens that the model sampled."""
    finish_reason: Literal["stop", "length"] | None = None
    """``stop``: a stop id, ``on_token``, a cancellation, an error. ``length``: ``max_new_tokens``. None: unfinished."""
    error: Exception | None = None
    """The error that ended the generation."""

    def __post_init__(self) -> None:
        self._uniform: float | None = None
        self._random = torch.Generator().manual_seed(self.seed % (1 << 63))

    @property
    def window_length(self) -> int:
        """Number of tokens that the next one depends on."""
        return len(self.prompt) + len(self.ids) - self.window_start

    def next_uniform(self) -> float:
        """Return a random number in (0, 1] that depends on the seed and the number of calls only, not on the batch."""
        return 1.0 - float(torch.rand(1, generator=self._random))

    def choose_uniform(self) -> float:
        """Return the random number of the next id, the same until an id is appended: a failed step can be repeated."""
        if self._uniform is None:
            self._uniform = self.next_uniform()
        return self._uniform

    def fail(self, error: Exception) -> None:
        """End with an error."""
        self.finish_reason, self.error = "stop", error

    def append(self, token_id: int, score: TokenScore | None) -> None:
        """Add a new id, and set ``finish_reason`` if it is the last one."""
        self._uniform = None
        if token_id in self.stop_ids:
            self.end_score = None if score is None else (token_id, score)
            self.finish_reason = "stop"
            return
        self.ids.append(token_id)
        if score is not None:
            self.logprobs.append(score.logprob)
            self.alternatives.append(score.alternatives)
        is_complete = self.constraint and not self.stop_ids and self.constraint.is_complete  # no id ends it
        if self.on_token(token_id) or is_complete:
            self.finish_reason = "stop"
        elif len(self.ids) >= self.max_new_tokens:
            self.finish_reason = "length"
