"""The reference runner: torch's operators, on any device and for any model.

Shapes: B sequences, T new tokens of a sequence, N new tokens of all, S keys, P pages of the cache, C tokens of a page,
M pages of a sequence, A page tables, H query heads, G key and value heads, K head_dim, D d_model, V vocabulary.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
from torch import Tensor

from lm.inference.kv_cache import PAGE_TOKENS, KVCache, Tokens, count_pages
from lm.inference.served_adapters import use_adapters
from lm.model.ops.causal_attention import causal_attention
from lm.model.ops.windowed_attention import PLAIN, AttentionRule, masked_attention
from lm.model.transformer import TransformerLM

_QUERY_BLOCK = 256  # queries with one mask: its memory grows with the length, not with its square


class TorchRunner:
    """Computes new tokens of ``model`` with torch's operators; see :class:`lm.inference.runners.runner.Runner`."""

    def __init__(self, model: TransformerLM, cache: KVCache) -> None:
        self.model, self.cache = model, cache

    def decode(self, inputs_2B: Tensor, max_position: int) -> Tensor:
        """Return logits (B, V) of one new token in each of the first B rows."""
        count = inputs_2B.shape[1]
        with use_adapters(self.cache.adapters_of(range(count))):
            return self.decode_pages(inputs_2B, self.cache.tables[:, :count], max_position)

    def decode_pages(self, inputs_2B: Tensor, pages_ABM: Tensor, max_position: int) -> Tensor:
        """Return logits (B, V) of one new token in each of B sequences with these pages."""
        ids_B, positions_B = inputs_2B
        pages_ABM = pages_ABM[..., : count_pages(max_position + 1)].contiguous()
        attention = [
            DecodeAttention(keys, values, pages_ABM[table], positions_B) for keys, values, table in self.cache.layers
        ]
        hidden_B1D = self.model.hidden_states(ids_B[:, None], positions_B[:, None], attention)
        return self.model.logits(hidden_B1D.squeeze(1))

    def extend(self, rows: Sequence[int], tokens: Sequence[Tokens], starts: Sequence[int]) -> list[Tensor]:
        """Compute new tokens of several sequences at once, padded, and return their hidden states (T, D)."""
        lengths, device = [len(new) for new in tokens], self.cache.keys.device
        longest = max(lengths)
        self.cache.check_chunk(longest)
        ids_BT = torch.tensor([[*new, *[0] * (longest - len(new))] for new in tokens], device=device)
        new = _NewTokens.create(self.cache, rows, starts, lengths)
        attend = _attend_suffix if any(starts) else _attend_whole  # whole sequences have a faster attention
        last_position = self.model.config.context_length - 1  # of padding, whose result is not used
        positions_BT = new[0].positions_BT.clamp(max=last_position)
        attention = [partial(attend, new[table], keys, values) for keys, values, table in self.cache.layers]
        with use_adapters(self.cache.adapters_of(rows)):
            hidden_BTD = self.model.hidden_states(ids_BT, positions_BT, attention)
        return [hidden_TD[:length] for hidden_TD, length in zip(hidden_BTD, lengths, strict=True)]

    def sampling_context(self, batch_size: int) -> AbstractContextManager[None]:
        """Return the context in which to sample from logits (batch_size, V)."""
        return nullcontext()


def gather_pages(stored_GPCK: Tensor, pages_BM: Tensor) -> Tensor:
    """Return a copy of the keys or values (B, G, M C, K) of sequences."""
    return stored_GPCK[:, pages_BM].transpose(0, 1).flatten(2, 3)


@dataclass(frozen=True)
class DecodeAttention:
    """A layer's attention for one new token of each of B sequences.

    ``keys_GPCK`` and ``values_GPCK`` are the layer's cache, ``pages_BM`` the first pages of each sequence, contiguous.
    The new tokens are at ``positions_B``. :mod:`lm.inference.runners.cpu_layers` computes the same with CPU kernels.
    """

    keys_GPCK: Tensor
    values_GPCK: Tensor
    pages_BM: Tensor
    positions_B: Tensor

    def __call__(self, q_BH1K: Tensor, k_BG1K: Tensor, v_BG1K: Tensor, rule: AttentionRule = PLAIN) -> Tensor:
        """Store the new keys and values, and return the attention (B, H, 1, K)."""
        count = len(q_BH1K)
        page_B = self.pages_BM.gather(1, self.positions_B[:, None] // PAGE_TOKENS).squeeze(1)
        place_B = self.positions_B % PAGE_TOKENS
        self.keys_GPCK[:, page_B, place_B] = k_BG1K.squeeze(-2).transpose(0, 1)
        self.values_GPCK[:, page_B, place_B] = v_BG1K.squeeze(-2).transpose(0, 1)
        pages_BM, first_B1 = self._pages_of_window(rule)
        keys_BGSK, values_BGSK = (gather_pages(x, pages_BM) for x in (self.keys_GPCK, self.values_GPCK))
        positions_BS = first_B1 * PAGE_TOKENS + torch.arange(keys_BGSK.shape[2], device=q_BH1K.device)
        mask_B11S = rule.allows(self.positions_B[:, None], positions_BS)[:, None, None]
        # The queries that share a key and value head are one more axis: no copy of the keys for each head.
        grouped_q = q_BH1K.view(count, k_BG1K.shape[1], -1, q_BH1K.shape[-1])
        return masked_attention(grouped_q, keys_BGSK, values_BGSK, mask_B11S, rule.softcap).view(q_BH1K.shape)

    def _pages_of_window(self, rule: AttentionRule) -> tuple[Tensor, Tensor]:
        """Return the pages of each sequence with the tokens of its window, and the number (B, 1) of the first. As many
        for all, whatever their positions: a CUDA graph has fixed shapes."""
        width = self.pages_BM.shape[1]
        num_pages = width if rule.window is None else min(width, count_pages(rule.window) + 1)
        first_B1 = torch.zeros_like(self.positions_B)[:, None]
        if num_pages == width or rule.window is None:
            return self.pages_BM, first_B1
        first_B1 = ((self.positions_B[:, None] - rule.window + 1) // PAGE_TOKENS).clamp(0, width - num_pages)
        return self.pages_BM.gather(1, first_B1 + torch.arange(num_pages, device=first_B1.device)), first_B1


@dataclass(frozen=True)
class _NewTokens:
    """New tokens (B, T) of sequences, some of them padding, and their places by a page table of a cache."""

    positions_BT: Tensor
    start: int
    """The first position of all."""
    index_N: tuple[Tensor, Tensor]
    """The new tokens that are no padding: in B and in T."""
    pages_BM: Tensor
    """The pages of each sequence, up to the last new token."""
    places_N: tuple[Tensor, Tensor]
    """Their pages, and their places in these."""
    run: slice | None
    """The pages, if there is one sequence and they follow each other in memory."""

    @classmethod
    def create(cls, cache: KVCache, rows: Sequence[int], starts: Sequence[int], lengths: Sequence[int]) -> list[Self]:
        """Return the new tokens with their places by each page table."""
        device = cache.keys.device
        rows_B, starts_B, lengths_B = (torch.tensor(numbers, device=device) for numbers in (rows, starts, lengths))
        steps_T = torch.arange(max(lengths), device=device)
        batch_N, step_N = (steps_T < lengths_B[:, None]).nonzero(as_tuple=True)
        positions_N = starts_B[batch_N] + step_N
        num_pages = count_pages(max(start + length for start, length in zip(starts, lengths, strict=True)))
        pages = cache.pages(rows[0])[:num_pages]
        runs: list[slice | None] = [None] * len(cache.tables)
        if len(rows) == 1 and pages and pages == [*range(pages[0], pages[0] + num_pages)]:
            runs[0] = slice(pages[0], pages[0] + num_pages)
        page_N, place_N = positions_N // PAGE_TOKENS, positions_N % PAGE_TOKENS
        tokens = starts_B[:, None] + steps_T, min(starts), (batch_N, step_N)
        return [
            cls(*tokens, pages_BM, (pages_BM[batch_N, page_N], place_N), run)
            for pages_BM, run in zip(cache.tables[:, rows_B, :num_pages], runs, strict=True)
        ]

    def store(self, stored_GPCK: Tensor, new_BGTK: Tensor) -> None:
        """Store the new keys or values of a layer."""
        (page_N, place_N), (batch_N, step_N) = self.places_N, self.index_N
        stored_GPCK[:, page_N, place_N] = new_BGTK[batch_N, :, step_N].transpose(0, 1)

    def gather(self, stored_GPCK: Tensor, first: int) -> Tensor:
        """Return the keys or values (B, G, S, K) of a layer from the page ``first`` of the sequences on, as a view if
        they follow each other."""
        if self.run is None:
            return gather_pages(stored_GPCK, self.pages_BM[:, first:])
        return stored_GPCK[:, self.run][:, first:].flatten(1, 2)[None]


def _attend_whole(
    new: _NewTokens,
    keys_GPCK: Tensor,
    values_GPCK: Tensor,
    q_BHTK: Tensor,
    k_BGTK: Tensor,
    v_BGTK: Tensor,
    rule: AttentionRule = PLAIN,
) -> Tensor:
    """Return the attention of sequences from their beginning. Their keys and values enter the cache."""
    new.store(keys_GPCK, k_BGTK)
    new.store(values_GPCK, v_BGTK)
    return causal_attention(q_BHTK, k_BGTK, v_BGTK, rule)


def _attend_suffix(
    new: _NewTokens,
    keys_GPCK: Tensor,
    values_GPCK: Tensor,
    q_BHTK: Tensor,
    k_BGTK: Tensor,
    v_BGTK: Tensor,
    rule: AttentionRule = PLAIN,
) -> Tensor:
    """Return the attention of tokens that continue sequences. Their keys and values enter the cache."""
    new.store(keys_GPCK, k_BGTK)
    new.store(values_GPCK, v_BGTK)
    first = 0 if rule.window is None else max(0, new.start - rule.window + 1) // PAGE_TOKENS  # page of all windows
    keys_BGSK, values_BGSK = new.gather(keys_GPCK, first), new.gather(values_GPCK, first)
    start = first * PAGE_TOKENS
    positions_S = torch.arange(start, start + keys_BGSK.shape[2], device=keys_BGSK.device)
    outputs = []
    for q, positions in zip(q_BHTK.split(_QUERY_BLOCK, -2), new.positions_BT.split(_QUERY_BLOCK, -1), strict=True):
        mask = rule.allows(positions[:, None, :, None], positions_S)  # (B, 1, block, S)
        seen = slice(0, None)
        if rule.window is not None:  # the keys of a window of any of the sequences
            oldest = max(start, int(positions.min()) - rule.window + 1)
            seen = slice(oldest - start, int(positions.max()) + 1 - start)
        keys, values = keys_BGSK[..., seen, :], values_BGSK[..., seen, :]
        outputs.append(masked_attention(q, keys, values, mask[..., seen], rule.softcap))
    return torch.cat(outputs, -2)
