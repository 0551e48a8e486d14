"""Prefill: compute whole sequences at once into rows of a KV cache, without the prefixes that are stored already."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lm.inference.kv_cache import BLOCK_TOKENS, KVCache, PrefixCache, Tokens
from lm.inference.runners.runner import Runner

_MAX_BATCH_TOKENS = 8192  # computed at once, with padding: bounds the memory of many long prompts


class PrefillJob(NamedTuple):
    """A sequence to compute."""

    row: int
    tokens: Tokens
    needs_all_hidden: bool = False
    """True: return the hidden states of all tokens. False: only the last one is sure to be there."""


class Prefilled(NamedTuple):
    """A computed sequence."""

    hidden: Tensor
    """Final hidden states (T, D) of the last T tokens."""
    num_cached: int
    """Number of tokens that were stored already."""


class Prefill:
    """Computes sequences with ``runner`` into rows of ``cache``. ``num_computed`` counts the tokens so far."""

    def __init__(self, runner: Runner, cache: KVCache, prefix_cache: PrefixCache | None) -> None:
        self._runner, self._cache, self._prefix_cache = runner, cache, prefix_cache
        self.num_computed = 0

    def __call__(self, jobs: Sequence[PrefillJob], uses_prefix_cache: bool = True) -> list[Prefilled]:
        """Compute the sequences of ``jobs``, equal ones once."""
        prefix_cache = self._prefix_cache if uses_prefix_cache else None
        merged: dict[Tokens, PrefillJob] = {}
        for job in jobs:
            first = merged.setdefault(job.tokens, job)
            if job.needs_all_hidden and not first.needs_all_hidden:
                merged[job.tokens] = first._replace(needs_all_hidden=True)
        results: dict[Tokens, Prefilled] = {}
        waiting = list(merged.values())
        while waiting:
            wave, waiting = (waiting, []) if prefix_cache is None else _split(waiting, prefix_cache)
            results |= self._compute_wave(wave, prefix_cache)
        for job in jobs:
            if (source := merged[job.tokens].row) != job.row:
                self._cache.copy_rows([source], [job.row])
        return [results[job.tokens] for job in jobs]

    def _compute_wave(self, jobs: list[PrefillJob], prefix_cache: PrefixCache | None) -> dict[Tokens, Prefilled]:
        stored: dict[Tokens, Tensor] = {}  # the hidden states of the tokens that need no computing
        if prefix_cache is not None:
            for job in jobs:
                if blocks := prefix_cache.match(job.tokens, job.needs_all_hidden):
                    stored[job.tokens] = prefix_cache.load(blocks, self._cache, job.row)
        results: dict[Tokens, Prefilled] = {}
        # Sequences that are computed from their start have a faster attention.
        fresh, continued = ([job for job in jobs if (job.tokens in stored) == is_stored] for is_stored in (False, True))
        lengths = {job.tokens: len(job.tokens) - len(stored.get(job.tokens, ())) for job in jobs}
        for batch in (*_batches(fresh, lengths), *_batches(continued, lengths)):
            starts = [len(job.tokens) - lengths[job.tokens] for job in batch]
            suffixes = [job.tokens[start:] for job, start in zip(batch, starts, strict=True)]
            self.num_computed += sum(map(len, suffixes))
            computed = self._runner.extend([job.row for job in batch], suffixes, starts)
            for job, start, hidden in zip(batch, starts, computed, strict=True):
                if prefix_cache is not None:
                    prefix_cache.store(job.tokens, self._cache, job.row, hidden, start)
                if job.needs_all_hidden and start:
                    hidden = torch.cat([stored[job.tokens], hidden])
                results[job.tokens] = Prefilled(hidden, start)
        return results


def _batches(jobs: list[PrefillJob], lengths: Mapping[Tokens, int]) -> Iterator[list[PrefillJob]]:
    """Yield jobs of similar numbers of tokens to compute, few enough that the padded ones are not many tokens."""
    batch: list[PrefillJob] = []
    for job in sorted(jobs, key=lambda job: lengths[job.tokens]):
        if batch and (len(batch) + 1) * lengths[job.tokens] > _MAX_BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(job)
    if batch:
        yield batch


def _split(jobs: list[PrefillJob], prefix_cache: PrefixCache) -> tuple[list[PrefillJob], list[PrefillJob]]:
    """Return the jobs to compute now, and the jobs that can use what the first ones compute."""
    now: list[PrefillJob] = []
    later: list[PrefillJob] = []
    claimed: set[Tokens] = set()
    for job in jobs:
        end = (len(prefix_cache.match(job.tokens, job.needs_all_hidden)) + 1) * BLOCK_TOKENS
        prefix = job.tokens[:end]  # with the first block that is missing
        (later if end < len(job.tokens) and prefix in claimed else now).append(job)
        claimed.add(prefix)
    return now, later
