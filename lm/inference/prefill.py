"""Prefill: compute whole sequences at once into rows of a KV cache, without the beginnings that are stored already."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lm.inference.compiled_step import CompiledStep
from lm.inference.kv_cache import KVCache
from lm.inference.prefix_cache import BLOCK_TOKENS, PrefixCache
from lm.model.transformer import TransformerLM

Tokens = tuple[int, ...]
_MAX_BATCH_TOKENS = 8192  # computed at once, with padding: bounds the memory of many long prompts


class PrefillJob(NamedTuple):
    """A sequence to compute."""

    row: int
    tokens: Tokens
    needs_all_hidden: bool = False
    """Whether the hidden states of all tokens are returned, or at least that of the last."""


class Prefilled(NamedTuple):
    """A computed sequence."""

    hidden: Tensor
    """Final hidden states (T, D) of the last T tokens."""
    num_cached: int
    """Number of tokens that were stored already."""


class Prefill:
    """Computes sequences with ``model``, few tokens with ``step``, into rows of ``cache``.

    ``num_computed`` counts the tokens computed so far.
    """

    def __init__(
        self, model: TransformerLM, cache: KVCache, prefix_cache: PrefixCache | None, step: CompiledStep | None
    ) -> None:
        self._model, self._cache, self._prefix_cache, self._step = model, cache, prefix_cache, step
        self._device = cache.keys.device
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
        for group in (*_batches(fresh, lengths), *_batches(continued, lengths)):
            starts = [len(job.tokens) - lengths[job.tokens] for job in group]
            suffixes = [job.tokens[start:] for job, start in zip(group, starts, strict=True)]
            self.num_computed += sum(map(len, suffixes))
            computed = self.compute([job.row for job in group], suffixes, starts)
            for job, start, hidden in zip(group, starts, computed, strict=True):
                if prefix_cache is not None:
                    prefix_cache.store(job.tokens, self._cache, job.row, hidden, start)
                if job.needs_all_hidden and start:
                    hidden = torch.cat([stored[job.tokens], hidden])
                results[job.tokens] = Prefilled(hidden, start)
        return results

    def compute(self, row_list: Sequence[int], suffixes: Sequence[Tokens], starts: Sequence[int]) -> list[Tensor]:
        """Compute tokens that continue sequences of the cache, and return their hidden states (T, D).

        Each of ``suffixes`` begins at a position of ``starts``, in a row of ``row_list``.
        """
        if not suffixes:
            return []
        lengths = [len(suffix) for suffix in suffixes]
        if self._step is not None and sum(lengths) <= self._step.max_tokens:
            positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)])
            token_rows = torch.tensor(row_list).repeat_interleave(torch.tensor(lengths))
            ids = torch.tensor([token for suffix in suffixes for token in suffix])
            return list(self._step.hidden_states(ids, token_rows, positions).split(lengths))
        longest = max(lengths)
        ids = torch.tensor([[*suffix, *[0] * (longest - len(suffix))] for suffix in suffixes], device=self._device)
        rows = torch.tensor(row_list, device=self._device)
        if any(starts):
            positions = torch.tensor(starts, device=self._device)[:, None] + torch.arange(longest, device=self._device)
            attention = self._cache.suffix_attention(rows, positions, torch.tensor(lengths, device=self._device))
            last_position = self._model.config.context_length - 1  # of padding, whose result is not used
            hidden = self._model.hidden_states(ids, positions.clamp(max=last_position), attention)
        else:
            hidden = self._model.hidden_states(ids, None, self._cache.prefill_attention(rows))
        return [states[:length] for states, length in zip(hidden, lengths, strict=True)]


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
    """Return the jobs to compute now, and those that can use what the first ones compute."""
    now: list[PrefillJob] = []
    later: list[PrefillJob] = []
    claimed: set[Tokens] = set()
    for job in jobs:
        end = (len(prefix_cache.match(job.tokens, job.needs_all_hidden)) + 1) * BLOCK_TOKENS
        beginning = job.tokens[:end]  # with the first block that is missing
        (later if end < len(job.tokens) and beginning in claimed else now).append(job)
        claimed.add(beginning)
    return now, later
