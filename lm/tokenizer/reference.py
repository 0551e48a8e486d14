"""BPE encoding in plain Python: the reference that the compiled encoder is tested against.

It also encodes for the patterns and merges that the compiled encoder does not support.
Source: Sennrich et al. 2016 (BPE).
"""

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from lm.text.character_tables import pretokenize_by_tables
from lm.text.pretokenize import Pattern
from lm.text.utf8 import encode_utf8

_MAX_CACHE_ENTRIES = 1 << 18  # about 50 MB
_MAX_CACHED_BYTES = 64  # length of a cached pretoken

Token = TypeVar("Token", int, bytes)


class ReferenceEncoder:
    """Encodes text with ``regex`` and :func:`apply_merges`. Caches the ids of short pretokens.

    A pretoken in ``whole_tokens`` is one token, whatever the merges. ``tables``: those by which a known pattern splits
    text; others follow ``regex``.
    """

    def __init__(
        self,
        ids: Mapping[bytes, int],
        merges: Sequence[tuple[bytes, bytes]],
        pattern: Pattern,
        whole_tokens: Mapping[bytes, int],
        tables: str,
    ) -> None:
        self._whole_tokens = whole_tokens
        self._tables = tables
        self._pattern = pattern
        self._byte_ids = [ids[bytes([byte])] for byte in range(256)]
        self._merges: dict[tuple[int, int], tuple[int, int]] = {}  # pair of ids → (rank, merged id)
        for rank, (left, right) in enumerate(merges):
            self._merges.setdefault((ids[left], ids[right]), (rank, ids[left + right]))
        self._cache: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``, which is normalized and without added tokens."""
        ids: list[int] = []
        for pretoken in pretokenize_by_tables(text, self._pattern, self._tables):
            ids += self._cache.get(pretoken) or self._encode_pretoken(pretoken)
        return ids

    def _encode_pretoken(self, pretoken: str) -> list[int]:
        data = encode_utf8(pretoken)
        if (token := self._whole_tokens.get(data)) is not None:
            ids = [token]
        else:
            ids = apply_merges([self._byte_ids[byte] for byte in data], self._merges.get)
        if len(data) <= _MAX_CACHED_BYTES:
            if len(self._cache) >= _MAX_CACHE_ENTRIES:
                self._cache.clear()
            self._cache[pretoken] = ids
        return ids


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
