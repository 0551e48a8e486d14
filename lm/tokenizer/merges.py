"""Merges of a vocabulary: how they apply, which of them can happen, and those that follow from the ranks of tokens."""

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from lm.kernels.jit import Int32s

Token = TypeVar("Token", int, bytes)


def apply_merges(
    parts: Iterable[Token], find_merge: Callable[[tuple[Token, Token]], tuple[int, Token] | None]
) -> list[Token]:
    """Merge neighbouring ``parts`` until no pair can be merged: lowest rank first, then leftmost.

    ``find_merge`` returns the rank and the merged token of a pair, or None. Takes O(n log n) time for n parts.
    """
    tokens = list(parts)
    end = len(tokens)
    following = list(range(1, end + 1))
    previous = list(range(-1, end))
    heap: list[tuple[int, int, tuple[Token, Token], Token]] = []

    def push_pair(left: int) -> None:
        right = following[left]
        if right < end and (merge := find_merge(pair := (tokens[left], tokens[right]))):
            heapq.heappush(heap, (merge[0], left, pair, merge[1]))

    for left in range(end):
        push_pair(left)
    while heap:
        _, left, pair, merged = heapq.heappop(heap)
        right = following[left]
        if right == end or (tokens[left], tokens[right]) != pair:
            continue  # stale: one of the two was merged with its other neighbour
        tokens[left] = merged
        following[left], following[right] = following[right], end
        previous[following[left]] = left
        push_pair(left)
        if left > 0:
            push_pair(previous[left])
    kept = []
    left = 0
    while left < end:
        kept.append(tokens[left])
        left = following[left]
    return kept


def find_reachable_merges(merges: Sequence[tuple[bytes, bytes]]) -> Int32s:
    """Return the ranks of the merges that can happen, ascending. A merge that is alone to make its token is kept.

    The tokenizer.json of Llama 3 has twice as many merges as tokens, because it was converted from ranks of tokens: it
    has one merge for each way to split a token into two tokens.
    """
    ranks_of: dict[bytes, list[int]] = defaultdict(list)
    for rank, (left, right) in enumerate(merges):
        ranks_of[left + right].append(rank)
    if len(ranks_of) == len(merges):
        return np.arange(len(merges), dtype=np.int32)
    first_rank = {merge: rank for rank, merge in reversed([*enumerate(merges)])}
    reachable = []
    for token, ranks in ranks_of.items():
        if len(ranks) == 1:
            reachable += ranks
        elif merge := _find_last_merge(token, first_rank.get):
            reachable.append(first_rank[merge])
    return np.array(sorted(reachable), np.int32)


def derive_merges(vocab: Mapping[int, bytes]) -> list[tuple[bytes, bytes]]:
    """Return the merges that follow from ranks, in their order."""
    ranks = {token: rank for rank, token in sorted(vocab.items()) if len(token) > 1}
    merges = (_find_last_merge(token, lambda pair: ranks.get(pair[0] + pair[1])) for token in ranks)
    return [merge for merge in merges if merge]


def _find_last_merge(
    token: bytes, find_rank: Callable[[tuple[bytes, bytes]], int | None]
) -> tuple[bytes, bytes] | None:
    """Return the parts of the merge that makes ``token`` from its bytes; None if the merges do not make it.

    Other merges of the same token never happen: what is merged within a token does not depend on the text around it.
    """

    def find_inner(pair: tuple[bytes, bytes]) -> tuple[int, bytes] | None:
        merged = pair[0] + pair[1]
        rank = find_rank(pair) if len(merged) < len(token) else None
        return None if rank is None else (rank, merged)

    parts = apply_merges([token[i : i + 1] for i in range(len(token))], find_inner)
    return (parts[0], parts[1]) if len(parts) == 2 and find_rank((parts[0], parts[1])) is not None else None
