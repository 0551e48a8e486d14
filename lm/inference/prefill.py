"""Prefill: compute sequences in chunks into rows of a KV cache, without the prefixes that are stored already.

A chunk bounds the time between two decode steps, so that a long prompt does not stop the others. Source: Agrawal et al.
2023 (Sarathi: chunked prefills).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lm.inference.generation_request import Generation
from lm.inference.kv_cache import PAGE_TOKENS, KVCache, Tokens, count_pages
from lm.inference.prefix_cache import PrefixCache
from lm.inference.runners.runner import Runner
from lm.inference.sampler import score_tokens
from lm.model.transformer import TransformerLM

_MAX_BATCH_TOKENS = 8192  # computed at once, with padding: bounds the memory of many long prompts
_MAX_LOGITS = 1 << 24  # numbers at a time for the log-probabilities of a prompt


@dataclass(eq=False)
class PrefillJob:
    """A sequence that is computed chunk by chunk."""

    generation: Generation
    row: int
    tokens: Tokens
    owns_pages: bool
    """Whether its pages must not be shared, because it will write over them."""
    is_prompt: bool = True
    """False: the last part of a text that outgrew the context. It is not stored, and scored before."""
    num_computed: int = 0
    """Number of tokens whose keys and values are in the row."""
    num_reused: int = 0
    """Number of these tokens that were stored already."""
    num_scored: int = 0
    """Number of tokens whose hidden states gave log-probabilities, if these are wanted."""
    last_hidden: Tensor | None = None
    """Hidden state (D,) of the last token, as soon as it is computed."""

    @property
    def identity(self) -> tuple[int, Tokens]:
        """What the keys and values depend on: the adapter and the tokens."""
        return self.generation.adapter, self.tokens

    @property
    def needs_scores(self) -> bool:
        """Whether the log-probabilities of the tokens are wanted."""
        return self.is_prompt and self.generation.wants_prompt_logprobs

    @property
    def num_unscored(self) -> int:
        """Number of tokens that are stored and not scored yet."""
        return self.num_computed - self.num_scored if self.needs_scores else 0

    @property
    def num_left(self) -> int:
        """Number of tokens to score, if some are stored already, else to compute."""
        return self.num_unscored or len(self.tokens) - self.num_computed


class _Piece(NamedTuple):
    """The next tokens of a job."""

    job: PrefillJob
    num_tokens: int


class Prefill:
    """Computes sequences with ``runner`` into rows of ``cache``. ``num_computed`` counts the tokens so far."""

    def __init__(
        self, model: TransformerLM, runner: Runner, cache: KVCache, prefix_cache: PrefixCache | None = None
    ) -> None:
        self._model, self._runner, self._cache, self._prefix_cache = model, runner, cache, prefix_cache
        self.num_computed = 0

    def reserve(self, job: PrefillJob, num_tokens: int) -> bool:
        """Give the job's row the pages of ``num_tokens`` tokens, among them those that are stored.

        Stored pages that no sequence uses make room. Returns False, and changes nothing, if that is not enough.
        """
        cache = self._cache
        shared = [] if job.owns_pages else self._match(job)
        num_new = count_pages(num_tokens) - len(shared)
        if num_new > cache.num_free + cache.num_idle - sum(map(cache.is_idle, shared)):
            return False
        cache.share(job.row, shared)  # first: what is in use stays
        if self._prefix_cache is not None:
            self._prefix_cache.make_room(num_new)
        cache.extend(job.row, num_new)
        job.num_computed = job.num_reused = len(shared) * PAGE_TOKENS
        return True

    def __call__(self, jobs: Sequence[PrefillJob], max_tokens: int | None = None) -> None:
        """Compute the next tokens of ``jobs``, at most ``max_tokens`` (8,192 by default), but at least 16 of a job.

        A job waits while one before it computes a prefix that both share, or the same sequence. If that fails, it can
        be repeated.
        """
        pieces = self._choose(jobs, max(PAGE_TOKENS, max_tokens or _MAX_BATCH_TOKENS))
        scored = [piece for piece in pieces if piece.job.num_unscored]
        # Sequences that are computed from their start have a faster attention.
        fresh = [piece for piece in pieces if not piece.job.num_computed]
        continued = [piece for piece in pieces if piece.job.num_computed and not piece.job.num_unscored]
        for job, count in scored:
            self._score(job, self._stored_hidden(job, count))
            job.num_scored += count
        for batch in (*_batches(fresh), *_batches(continued)):
            starts = [job.num_computed for job, _ in batch]
            suffixes = [job.tokens[start : start + count] for (job, count), start in zip(batch, starts, strict=True)]
            computed = self._runner.extend([job.row for job, _ in batch], suffixes, starts)
            for (job, _), hidden in zip(batch, computed, strict=True):
                self._record(job, hidden)
        self._copy_to_equal_jobs(jobs)

    def _match(self, job: PrefillJob) -> list[int]:
        """Return the stored pages of the job's first tokens."""
        if self._prefix_cache is None or not job.is_prompt:
            return []
        return self._prefix_cache.match(job.tokens, job.needs_scores, job.generation.adapter)

    def _choose(self, jobs: Sequence[PrefillJob], max_tokens: int) -> list[_Piece]:
        """Return the tokens of the next chunk: half of it for the first job, the rest for the shortest others."""
        runnable: list[PrefillJob] = []
        claimed: set[tuple[int, Tokens]] = set()
        for job in jobs:
            if job.last_hidden is not None:
                continue  # its first token is to be sampled
            self._reuse_stored(job)
            is_shared = self._prefix_cache is not None and job.is_prompt
            adapter, tokens = job.identity
            claim = adapter, tokens[: job.num_computed + PAGE_TOKENS] if is_shared else tokens
            if claim not in claimed:
                runnable.append(job)
            claimed.add(claim)
        if not runnable:
            return []
        first, *others = runnable
        counts = {first: self._round(first.num_left, max(PAGE_TOKENS, max_tokens // 2))}
        num_free = max_tokens - counts[first]
        for job in sorted(others, key=lambda job: job.num_left):
            counts[job] = self._round(job.num_left, num_free)
            num_free -= counts[job]
        counts[first] = self._round(first.num_left, counts[first] + num_free)
        return [_Piece(job, count) for job, count in counts.items() if count]

    def _round(self, num_left: int, limit: int) -> int:
        """Return how many of ``num_left`` tokens to compute: all, or whole pages, as chunks begin with a page."""
        limit = min(limit, self._cache.max_chunk_tokens)
        return num_left if num_left <= limit else limit // PAGE_TOKENS * PAGE_TOKENS

    def _reuse_stored(self, job: PrefillJob) -> None:
        """Take the stored pages of tokens that are still to be computed."""
        pages = self._match(job)
        if (num_stored := len(pages) * PAGE_TOKENS) > job.num_computed:
            if job.owns_pages:
                self._cache.copy_pages(pages, self._cache.pages(job.row)[: len(pages)])
            else:
                self._cache.share(job.row, pages)
            job.num_reused += num_stored - job.num_computed
            job.num_computed = num_stored

    def _record(self, job: PrefillJob, hidden: Tensor) -> None:
        """Record that tokens with these hidden states (T, D) are computed."""
        end = job.num_computed + len(hidden)
        if self._prefix_cache is not None and job.is_prompt:
            self._prefix_cache.store(job.tokens[:end], job.row, hidden, job.num_computed, job.owns_pages)
        if job.needs_scores:
            self._score(job, hidden)
            job.num_scored = end
        if end == len(job.tokens):
            job.last_hidden = hidden[-1]
        job.num_computed = end
        self.num_computed += len(hidden)

    def _stored_hidden(self, job: PrefillJob, count: int) -> Tensor:
        """Return the hidden states (count, D) of the first stored tokens that are not scored."""
        if self._cache.hidden is None:
            raise RuntimeError("the cache was made without hidden states, so no token of it is stored")
        page, offset = divmod(job.num_scored, PAGE_TOKENS)
        pages = self._cache.pages(job.row)[page : count_pages(job.num_scored + count)]
        return self._cache.hidden[pages].flatten(0, 1)[offset : offset + count]

    def _score(self, job: PrefillJob, hidden: Tensor) -> None:
        """Append the log-probabilities of the tokens after those with the hidden states (T, D)."""
        start, generation = job.num_scored, job.generation
        del generation.prompt_logprobs[start:], generation.prompt_alternatives[start:]  # of a chunk that failed
        targets = torch.tensor(job.tokens[start + 1 : start + 1 + len(hidden)], device=hidden.device)
        size = max(1, _MAX_LOGITS // (self._model.config.vocab_size or 1))
        for part, part_targets in zip(hidden[: len(targets)].split(size), targets.split(size), strict=True):
            for score in score_tokens(self._model.logits(part), part_targets, generation.num_alternatives):
                generation.prompt_logprobs.append(score.logprob)
                generation.prompt_alternatives.append(score.alternatives)

    def _copy_to_equal_jobs(self, jobs: Sequence[PrefillJob]) -> None:
        """Finish the jobs whose sequence another one has computed, with scores if they need them."""
        finished: dict[tuple[int, Tokens], PrefillJob] = {}
        for job in jobs:
            if job.last_hidden is not None:
                finished.setdefault(job.identity, job)
        for job in jobs:
            source = finished.get(job.identity)
            if job.last_hidden is None and source is not None and _has_scores_of(source, job):
                self._copy_pages(source, job)
                if job.needs_scores:
                    job.generation.prompt_logprobs = [*source.generation.prompt_logprobs]
                    job.generation.prompt_alternatives = [*source.generation.prompt_alternatives]
                job.num_computed, job.num_reused = source.num_computed, source.num_reused
                job.num_scored, job.last_hidden = source.num_scored, source.last_hidden

    def _copy_pages(self, source: PrefillJob, target: PrefillJob) -> None:
        """Give a job the pages of another one, and a copy of the last page, to which each adds its own tokens."""
        num_pages, num_shared = count_pages(len(source.tokens)), len(source.tokens) // PAGE_TOKENS
        if source.owns_pages or target.owns_pages:
            num_shared = 0
        pages, targets = self._cache.pages(source.row), self._cache.pages(target.row)
        self._cache.copy_pages(pages[num_shared:num_pages], targets[num_shared:num_pages])
        self._cache.share(target.row, pages[:num_shared])
        self._cache.copy_ring(source.row, target.row, len(source.tokens))


def _has_scores_of(source: PrefillJob, job: PrefillJob) -> bool:
    is_same = source.generation.num_alternatives == job.generation.num_alternatives
    return not job.needs_scores or (source.needs_scores and is_same)


def _batches(pieces: list[_Piece]) -> Iterator[list[_Piece]]:
    """Yield pieces of similar length, few enough that the padded ones are not many tokens."""
    batch: list[_Piece] = []
    for piece in sorted(pieces, key=lambda piece: piece.num_tokens):
        if batch and (len(batch) + 1) * piece.num_tokens > _MAX_BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(piece)
    if batch:
        yield batch
