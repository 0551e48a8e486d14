"""Batched generation of token ids with a KV cache; each sequence has settings of its own.

Prompts are prefilled whole, then each decoding step adds a token to every sequence. Sequences join and leave the batch
between steps. Sources: CS336 assignment 1 (section 6); Touvron et al. 2023 (Llama 2); Yu et al. 2022 (Orca: continuous
batching).
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from lm.common.errors import UserError
from lm.inference.config import SampleConfig
from lm.inference.constraints import Constraint
from lm.inference.kv_cache import KVCache, PrefixCache
from lm.inference.prefill import Prefill, PrefillJob
from lm.inference.runners.runner import make_runner
from lm.inference.sampler import LogitEditor, LogitEdits, Sampler, TokenScore, edit_logits, score_tokens
from lm.inference.speculation import PromptLookup
from lm.model.transformer import TransformerLM

log = logging.getLogger(__name__)

_MAX_LOGITS = 1 << 24  # numbers at a time for the log-probabilities of a prompt


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


class Engine:
    """Runs up to ``max_batch_size`` generations at once with one model.

    Of a prompt longer than ``max_seq_len`` tokens, by default the model's context, the last ``max_seq_len`` are read. A
    sequence that outgrows them continues from their last half, which is computed again from position 0. With
    ``prefix_cache_bytes``, a prompt that shares a prefix with a recent sequence computes only the rest; see
    :class:`lm.inference.kv_cache.PrefixCache`.
    """

    def __init__(
        self, model: TransformerLM, max_batch_size: int, max_seq_len: int | None = None, prefix_cache_bytes: int = 0
    ) -> None:
        parameter = next(model.parameters())
        self.model, self.device = model, parameter.device
        self.max_batch_size, self._vocab_size = max_batch_size, model.config.vocab_size or 1
        self.max_seq_len = min(max_seq_len or model.config.context_length, model.config.context_length)
        self.active: list[Generation] = []  # the index here is the row of the cache
        self._cache = KVCache(model.config, max_batch_size, self.max_seq_len, self.device, parameter.dtype)
        self._prefix_cache: PrefixCache | None = None
        if prefix_cache_bytes:
            self._prefix_cache = PrefixCache(model.config, prefix_cache_bytes, self.device, parameter.dtype)
        self._runner = make_runner(model, self._cache)
        self.prefill = Prefill(self._runner, self._cache, self._prefix_cache)
        self._sampler: Sampler | None = None  # of the active generations
        self._editors: dict[Generation, LogitEditor] = {}  # of the active generations that need one
        self._lookups: dict[Generation, PromptLookup] = {}  # of the active generations with speculative decoding

    def check_prompt(self, generation: Generation) -> None:
        """Raise UserError if the prompt is empty or holds ids outside the model's vocabulary."""
        vocab_size = self._vocab_size
        if not generation.prompt:
            raise UserError("The prompt is empty; give at least one token, such as the end-of-text token.")
        if bad := [token_id for token_id in generation.prompt if not 0 <= token_id < vocab_size]:
            raise UserError(f"The prompt holds token id {bad[0]}, outside the model's vocabulary of {vocab_size:,}.")

    @torch.inference_mode()
    def add(self, generations: Sequence[Generation]) -> None:
        """Prefill the prompts and sample the first token of each.

        Raises UserError for a bad prompt, before any is added, and ValueError if there are too few free rows. After
        any error none is added.
        """
        for generation in generations:
            self.check_prompt(generation)
        self._remove_finished()
        if not generations:
            return
        first = len(self.active)
        if first + len(generations) > self.max_batch_size:
            raise ValueError(f"{first} + {len(generations)} sequences are more than {self.max_batch_size}")
        self.active += generations
        for generation in generations:
            generation.window_start = max(0, len(generation.prompt) + len(generation.ids) - self.max_seq_len)
            if generation.max_new_tokens == 0:
                generation.finish_reason = "length"
            edits, penalty, constraint = generation.edits, generation.sampling.repetition_penalty, generation.constraint
            if penalty != 1 or edits != LogitEdits() or constraint:
                options = self._vocab_size, self.device, constraint, generation.stop_ids
                self._editors[generation] = LogitEditor(edits, penalty, generation.prompt, *options)
            if generation.sampling.speculative_tokens:
                self._lookups[generation] = PromptLookup(generation.prompt, generation.sampling.speculative_tokens)
        self._sampler = None
        try:
            logits = self._prefill(list(range(first, len(self.active))), uses_prefix_cache=True)
            self._sample(logits, generations)
        except Exception:
            for generation in self.active[first:]:
                self._forget(generation)
            del self.active[first:]
            raise
        self._remove_finished()

    @torch.inference_mode()
    def step(self) -> None:
        """Sample the next token of every active generation, and more if draft tokens are accepted.

        Remove finished generations. After an error, the step can be repeated with the same result.
        """
        self._remove_finished()
        if not self.active:
            return
        lengths = [generation.window_length for generation in self.active]
        drafts = [self._draft(generation) for generation in self.active]
        if any(drafts) and max(lengths) <= self.max_seq_len:
            self._verify(drafts)
        else:
            self._sample(self._next_logits(lengths), self.active)
        self._remove_finished()

    def _next_logits(self, lengths: list[int]) -> Tensor:
        """Return the logits (B, V) of the tokens after the active sequences, whose windows have ``lengths``."""
        overlong_rows = [row for row, length in enumerate(lengths) if length > self.max_seq_len]
        if len(overlong_rows) == len(self.active):
            return self._refill(overlong_rows)
        last_ids = [generation.ids[-1] for generation in self.active]
        positions = [min(length, self.max_seq_len) - 1 for length in lengths]
        logits = self._runner.decode(torch.tensor([last_ids, positions], device=self.device), max(positions))
        if overlong_rows:
            logits[overlong_rows] = self._refill(overlong_rows).to(logits.dtype)
        return logits

    def _refill(self, rows: list[int]) -> Tensor:
        """Compute the last half of full windows from position 0, and return the logits (rows, V) of the next tokens."""
        generations = [self.active[row] for row in rows]
        starts = [generation.window_start for generation in generations]
        for generation in generations:
            generation.window_start += generation.window_length - max(1, self.max_seq_len // 2)
        try:
            return self._prefill(rows, uses_prefix_cache=False)
        except Exception:
            for generation, start in zip(generations, starts, strict=True):
                generation.window_start = start
            raise

    def _draft(self, generation: Generation) -> list[int]:
        """Return draft tokens that leave room for one more token in the text and in the context."""
        if (lookup := self._lookups.get(generation)) is None:
            return []
        num_missing = generation.max_new_tokens - len(generation.ids)
        return lookup.draft(generation.ids, min(num_missing - 1, self.max_seq_len - generation.window_length))

    def _verify(self, drafts: list[list[int]]) -> None:
        """Sample the next token of every active generation, and one more after each draft token that was sampled.

        See :mod:`lm.inference.speculation`.
        """
        starts = [generation.window_length - 1 for generation in self.active]
        suffixes = [(generation.ids[-1], *draft) for generation, draft in zip(self.active, drafts, strict=True)]
        hidden = self._runner.extend(range(len(starts)), suffixes, starts)
        logits = self.model.logits(torch.cat(hidden)).split([len(suffix) for suffix in suffixes])
        num_accepted = [0] * len(starts)
        rows, i = list(range(len(starts))), 0
        while rows:
            ids = self._sample(torch.stack([logits[row][i] for row in rows]), [self.active[row] for row in rows])
            accepted = [row for row, new_id in zip(rows, ids, strict=True) if drafts[row][i : i + 1] == [new_id]]
            for row in accepted:
                num_accepted[row] += 1
            rows, i = [row for row in accepted if not self.active[row].finish_reason], i + 1
        for generation, draft, count in zip(self.active, drafts, num_accepted, strict=True):
            if draft:
                generation.num_draft_tokens += len(draft)
                generation.num_accepted_tokens += count
                self._lookups[generation].record(len(draft), count)

    def _remove_finished(self) -> None:
        """Remove finished generations. The last row moves into the place of each."""
        for row in reversed(range(len(self.active))):
            if self.active[row].finish_reason:
                self._store(row)
                self._forget(self.active[row])
                if row < (last := len(self.active) - 1):
                    self._cache.copy_rows([last], [row])  # first: if it fails, no row has the keys of another
                    self.active[row] = self.active[last]
                self.active.pop()

    def _forget(self, generation: Generation) -> None:
        """Drop the state of a generation that leaves the batch."""
        self._sampler = None
        self._editors.pop(generation, None)
        self._lookups.pop(generation, None)

    def _store(self, row: int) -> None:
        """Keep the sequence of a row in the prefix cache. The last id was not computed yet."""
        generation = self.active[row]
        is_complete = len(generation.prompt) + len(generation.ids) <= self.max_seq_len
        if self._prefix_cache is not None and generation.ids and is_complete:
            self._prefix_cache.store((*generation.prompt, *generation.ids[:-1]), self._cache, row)

    def _prefill(self, rows: list[int], uses_prefix_cache: bool) -> Tensor:
        """Compute the windows of sequences, and return the logits (rows, V) of their next tokens."""
        generations = [self.active[row] for row in rows]
        needs_scores = [generation.wants_prompt_logprobs and not generation.ids for generation in generations]
        sequences = [(*generation.prompt, *generation.ids)[generation.window_start :] for generation in generations]
        prefilled = self.prefill(list(map(PrefillJob, rows, sequences, needs_scores)), uses_prefix_cache)
        for generation, tokens, result, is_scored in zip(generations, sequences, prefilled, needs_scores, strict=True):
            if not generation.ids:
                generation.is_prefilled, generation.num_cached_tokens = True, result.num_cached
            if is_scored:
                self._score_prompt(generation, result.hidden[:-1], tokens)
        return self.model.logits(torch.stack([result.hidden[-1] for result in prefilled]))

    def _score_prompt(self, generation: Generation, hidden: Tensor, tokens: Sequence[int]) -> None:
        """Set the prompt's log-probabilities, from the hidden states (T - 1, D) before each id except the first."""
        generation.prompt_logprobs.clear()  # of a prefill that failed
        generation.prompt_alternatives.clear()
        targets = torch.tensor(tokens[1:], device=self.device)
        chunk_size = max(1, _MAX_LOGITS // self._vocab_size)
        for chunk, chunk_targets in zip(hidden.split(chunk_size), targets.split(chunk_size), strict=True):
            for score in score_tokens(self.model.logits(chunk), chunk_targets, generation.num_alternatives):
                generation.prompt_logprobs.append(score.logprob)
                generation.prompt_alternatives.append(score.alternatives)

    def _sample(self, logits: Tensor, generations: Sequence[Generation]) -> list[int]:
        """Sample from ``logits`` (rows, V) for some of the active generations, in this order. Return the ids."""
        logits = logits.float()  # argmax and max are slow in bfloat16
        uniform = torch.tensor([generation.choose_uniform() for generation in generations], device=self.device)
        settings = [generation.sampling for generation in generations]
        if len(generations) == len(self.active):  # kept until the batch changes
            sampler = self._sampler = self._sampler or Sampler(settings, self.device)
        else:
            sampler = Sampler(settings, self.device)
        with self._runner.sampling_context(len(logits)):
            ids = sampler.sample(edit_logits(logits, [*map(self._editors.get, generations)]), uniform)
            scores = self._score(logits, ids, generations)
        id_list: list[int] = ids.tolist()
        for row, (generation, token_id) in enumerate(zip(generations, id_list, strict=True)):
            if not generation.finish_reason:
                try:
                    if editor := self._editors.get(generation):
                        editor.record(token_id)
                    generation.append(token_id, scores.get(row))
                except Exception as error:
                    log.exception("A generation failed.")
                    generation.fail(error)
        return id_list

    def _score(self, logits: Tensor, ids: Tensor, generations: Sequence[Generation]) -> dict[int, TokenScore]:
        """Return the scores of ``ids`` (rows,) by the row, for the generations that want them."""
        rows = [row for row, generation in enumerate(generations) if generation.wants_logprobs]
        if not rows:
            return {}
        if len(rows) < len(generations):
            logits, ids = logits[rows], ids[rows]
        count = max(generations[row].num_alternatives for row in rows)
        scores = score_tokens(logits, ids, count)
        return {
            row: score._replace(alternatives=score.alternatives[: generations[row].num_alternatives])
            for row, score in zip(rows, scores, strict=True)
        }


def generate(model: TransformerLM, generations: Sequence[Generation], max_batch_size: int | None = None) -> None:
    """Run all ``generations`` to their end, ``max_batch_size`` at once (default: all).

    Raises UserError for a bad prompt, before anything is computed, and the error of a generation that fails.
    """
    for _ in generate_each(model, generations, max_batch_size):
        pass


def generate_each(
    model: TransformerLM, generations: Sequence[Generation], max_batch_size: int | None = None
) -> Iterator[Generation]:
    """Run all ``generations`` as :func:`generate` does, and yield each when it ends."""
    lengths = [len(generation.prompt) + generation.max_new_tokens for generation in generations]  # that the cache needs
    engine = Engine(model, min(max_batch_size or len(generations), len(generations)), max(lengths, default=1))
    for generation in generations:
        engine.check_prompt(generation)
    waiting = list(generations)
    running: list[Generation] = []
    while waiting or running:
        if free_rows := engine.max_batch_size - len(engine.active):
            engine.add(waiting[:free_rows])
            running += waiting[:free_rows]
            del waiting[:free_rows]
        engine.step()
        for generation in running:
            if generation.error:
                raise generation.error
        yield from (generation for generation in running if generation.finish_reason)
        running = [generation for generation in running if not generation.finish_reason]


def stream(model: TransformerLM, generation: Generation) -> Iterator[int]:
    """Yield the new ids of one generation as they are sampled."""
    engine = Engine(model, 1, len(generation.prompt) + generation.max_new_tokens)
    engine.add([generation])
    count = 0
    while True:
        yield from generation.ids[count:]
        count = len(generation.ids)
        if generation.error:
            raise generation.error
        if generation.finish_reason:
            return
        engine.step()
