"""Token ids out of a model: prompts of any lengths side by side, each with settings of its own, and a cache.

Prompts are prefilled whole; then a step draws one token for each. New ones may join and old ones leave between steps.
Sources: CS336 assignment 1 (section 6); Touvron et al. 2023 (Llama 2); Yu et al. 2022 (Orca: batches by the step).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from lm.cache import KVCache, one_more
from lm.errors import UserError
from lm.graphs import DecodeGraphs
from lm.model import TransformerLM
from lm.sampling import Drawing, SampleConfig, log_probabilities

_LOGITS = 1 << 24  # of a prompt at a time, for its log-probabilities


@dataclass(eq=False)
class Generation:
    """A sequence on its way: what is wanted, and what there is."""

    prompt: Sequence[int]
    """At least one id."""
    max_new_tokens: int
    sampling: SampleConfig = field(default_factory=SampleConfig)
    stop_ids: frozenset[int] = frozenset()
    """An id of these ends the generation, and is not part of it."""
    seed: int = 0
    wants_logprobs: bool = False
    """Whether ``prompt_logprobs`` and ``logprobs`` are filled."""
    on_token: Callable[[int], bool] = lambda token_id: False
    """Is told each new id, and says whether the generation shall end with it."""
    ids: list[int] = field(default_factory=list)
    """The new ones."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probability, in nats, of each of ``ids`` under the model."""
    prompt_logprobs: list[float] = field(default_factory=list)
    """The same of the prompt's ids but for the first, which nothing comes before."""
    ended: Literal["stop", "length"] | None = None
    """Why it is over: an id of ``stop_ids`` or ``on_token``, or its length."""

    def __post_init__(self) -> None:
        self._random = torch.Generator().manual_seed(self.seed % (1 << 63))

    def uniform(self) -> float:
        """A number in (0, 1], of the generation's own row of them: whom it is batched with changes nothing."""
        return 1.0 - float(torch.rand(1, generator=self._random))

    def take(self, token_id: int, logprob: float | None) -> None:
        """A new id."""
        if token_id in self.stop_ids:
            self.ended = "stop"
            return
        self.ids.append(token_id)
        if logprob is not None:
            self.logprobs.append(logprob)
        if self.on_token(token_id):
            self.ended = "stop"
        elif len(self.ids) >= self.max_new_tokens:
            self.ended = "length"


class Engine:
    """Up to ``max_batch_size`` generations side by side by one model.

    A sequence longer than ``max_seq_len`` tokens, by default the model's context, goes on from its last ones alone,
    which are computed anew for every token.
    """

    def __init__(self, model: TransformerLM, max_batch_size: int, max_seq_len: int | None = None) -> None:
        parameter = next(model.parameters())
        self.model, self.device = model, parameter.device
        self.max_batch_size = max_batch_size
        self.length = min(max_seq_len or model.config.context_length, model.config.context_length)
        self.live: list[Generation] = []  # each in the row of the cache that is its place here
        self._cache = KVCache(model.config, max_batch_size, self.length, self.device, parameter.dtype)
        self._one_more: Callable[[Tensor, int], Tensor] = partial(one_more, model, self._cache)
        if self.device.type == "cuda":
            self._one_more = DecodeGraphs(model, self._cache)
        self._drawing: Drawing | None = None
        self._seen: Tensor | None = None  # (rows, V): the tokens that are there, where a repetition costs something

    def check(self, generation: Generation) -> None:
        """Raise UserError for a prompt that is empty or holds ids outside the model's vocabulary."""
        vocab_size = self.model.config.vocab_size or 0
        if not generation.prompt:
            raise UserError("The prompt is empty; give at least one token, such as the end-of-text token.")
        if bad := [token_id for token_id in generation.prompt if not 0 <= token_id < vocab_size]:
            raise UserError(f"The prompt holds token id {bad[0]}, outside the model's vocabulary of {vocab_size:,}.")

    @torch.inference_mode()
    def add(self, generations: Sequence[Generation]) -> None:
        """Prefill the prompts and draw the first token of each. Raises UserError as :meth:`check` does, before any is
        added, and ValueError where there are more than rows left."""
        for generation in generations:
            self.check(generation)
        self._leave()
        if not generations:
            return
        first = len(self.live)
        if first + len(generations) > self.max_batch_size:
            raise ValueError(f"{first} + {len(generations)} sequences are more than {self.max_batch_size}")
        self.live += generations
        for row, generation in enumerate(generations, start=first):
            if generation.max_new_tokens == 0:
                generation.ended = "length"
            if generation.sampling.repetition_penalty != 1:
                if self._seen is None:
                    shape = (self.max_batch_size, self.model.config.vocab_size or 0)
                    self._seen = torch.zeros(shape, dtype=torch.bool, device=self.device)
                self._seen[row] = False
                self._seen[row, list(generation.prompt)] = True
        logits = self._prefill(list(range(first, len(self.live))))
        self._draw(logits, first, Drawing([one.sampling for one in generations], self.device))
        self._drawing = None
        self._leave()

    @torch.inference_mode()
    def step(self) -> None:
        """Draw a token more for every live generation; those that end leave."""
        self._leave()
        if not self.live:
            return
        lengths = [len(one.prompt) + len(one.ids) for one in self.live]
        longer = [row for row, length in enumerate(lengths) if length > self.length]
        if len(longer) == len(self.live):
            logits = self._prefill(longer)
        else:
            last = [one.ids[-1] for one in self.live]
            places = [min(length, self.length) - 1 for length in lengths]
            logits = self._one_more(torch.tensor([last, places], device=self.device), max(places))
            if longer:
                logits[longer] = self._prefill(longer)
        if self._drawing is None:
            self._drawing = Drawing([one.sampling for one in self.live], self.device)
        self._draw(logits, 0, self._drawing)
        self._leave()

    def _leave(self) -> None:
        """Take out what has ended: the last row moves to its place."""
        for row in reversed(range(len(self.live))):
            if self.live[row].ended:
                self._drawing = None
                last = self.live.pop()
                if row < len(self.live):
                    self.live[row] = last
                    self._cache.copy([len(self.live)], [row])
                    if self._seen is not None:
                        self._seen[row] = self._seen[len(self.live)]

    def _prefill(self, rows: list[int]) -> Tensor:
        """Compute the sequences of ``rows`` from the start; logits (rows, V) of what follows each. Of equal sequences
        one is computed."""
        wanted = [(*self.live[row].prompt, *self.live[row].ids)[-self.length :] for row in rows]
        number = {tokens: place for place, tokens in enumerate(dict.fromkeys(wanted))}
        homes = [rows[wanted.index(tokens)] for tokens in number]
        longest = max(map(len, number))
        ids = torch.tensor([[*tokens, *[0] * (longest - len(tokens))] for tokens in number], device=self.device)
        attend = self._cache.prefill(torch.tensor(homes, device=self.device))
        hidden = self.model.hidden(ids, None, attend)
        places = [number[tokens] for tokens in wanted]
        for row, place, tokens in zip(rows, places, wanted, strict=True):
            if self.live[row].wants_logprobs and not self.live[row].ids:
                self._score(self.live[row], hidden[place, : len(tokens) - 1], tokens)
        if len(homes) < len(rows):
            self._cache.copy([homes[place] for place in places], rows)
        ends = [len(tokens) - 1 for tokens in number]
        return self.model.logits(hidden[range(len(ends)), ends])[places]

    def _score(self, generation: Generation, hidden: Tensor, tokens: Sequence[int]) -> None:
        """The prompt's log-probabilities, from the hidden states before each of its ids but the first."""
        following = torch.tensor(tokens[1:], device=self.device)
        at_once = max(1, _LOGITS // (self.model.config.vocab_size or 1))
        for part, wanted in zip(hidden.split(at_once), following.split(at_once), strict=True):
            generation.prompt_logprobs += log_probabilities(self.model.logits(part), wanted).tolist()

    def _draw(self, logits: Tensor, first: int, drawing: Drawing) -> None:
        """Draw from ``logits`` (rows, V) for the live generations from ``first`` on."""
        logits = logits.float()  # the greatest of many bfloat16 is found slowly
        generations = self.live[first : first + len(logits)]
        uniform = torch.tensor([one.uniform() for one in generations], device=self.device)
        seen = self._seen[first : first + len(logits)] if self._seen is not None and drawing.has_penalty else None
        ids = drawing.draw(logits, uniform, seen)
        logprobs: list[float | None] = [None] * len(generations)
        if any(one.wants_logprobs for one in generations):
            logprobs = [*log_probabilities(logits, ids).tolist()]
        for row, (generation, token_id, logprob) in enumerate(zip(generations, ids.tolist(), logprobs, strict=True)):
            if not generation.ended:
                generation.take(token_id, logprob if generation.wants_logprobs else None)
                if seen is not None:
                    seen[row, token_id] = True


def generate(model: TransformerLM, generations: Sequence[Generation], max_batch_size: int | None = None) -> None:
    """Bring all of ``generations`` to their end, ``max_batch_size`` at a time, by default all together. Raises
    UserError for a bad prompt, before anything is computed."""
    engine = Engine(model, min(max_batch_size or len(generations), len(generations)), _longest(generations))
    for generation in generations:
        engine.check(generation)
    waiting = list(generations)
    while waiting or engine.live:
        if room := engine.max_batch_size - len(engine.live):
            engine.add(waiting[:room])
            del waiting[:room]
        engine.step()


def _longest(generations: Sequence[Generation]) -> int:
    """The tokens that the cache has to hold: for a model with a long context, much less than that."""
    return max((len(one.prompt) + one.max_new_tokens for one in generations), default=1)


def stream(model: TransformerLM, generation: Generation) -> Iterator[int]:
    """The ids of one generation, as they come."""
    engine = Engine(model, 1, _longest([generation]))
    engine.add([generation])
    given = 0
    while True:
        yield from generation.ids[given:]
        given = len(generation.ids)
        if generation.ended:
            return
        engine.step()
