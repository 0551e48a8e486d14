"""Encodes normalized text by a SentencePiece model, with compiled kernels.

The reference is :func:`lm.tokenizer.piece_reference.encode_pieces`.
"""

import numpy as np
import numpy.typing as npt
import regex

from lm.kernels.pieces import GONE, build_pairs, build_trie, encode_unigram, merge_pieces
from lm.tokenizer.piece_reference import list_entries, list_scores
from lm.tokenizer.sentencepiece_model import BYTE, UNKNOWN, USER_DEFINED, SentencePieceModel

_UNKNOWN = -1  # in the results of kernels
_FROZEN = -3  # symbol of the piece 0 of a user, which is not merged; that of the piece i is _FROZEN - i
_NUM_CODE_POINTS = 0x110000


class PieceEncoder:
    """The tables of a model for the kernels."""

    def __init__(self, model: SentencePieceModel) -> None:
        self._is_bpe, self._byte_fallback, self._size = model.is_bpe, model.byte_fallback, len(model.pieces)
        [self._unknown_id] = [i for i, piece in enumerate(model.pieces) if piece.type == UNKNOWN]
        self._byte_ids = {int(p.text[1:-1], 16): i for i, p in enumerate(model.pieces) if p.type == BYTE}
        entries = list_entries(model)
        if model.is_bpe:  # characters that are parts of pieces and no pieces have ids after those of all pieces
            parts = sorted({character for text in entries for character in text} - entries.keys())
            entries |= {character: self._size + number for number, character in enumerate(parts)}
        points, starts, ids = _pack([*entries]), _starts([*entries]), np.fromiter(entries.values(), np.int32)
        num_slots = _slots(len(points))
        self._keys, self._children = np.zeros(num_slots, np.uint64), np.zeros(num_slots, np.int32)
        self._values = np.full(len(points) + 1, -1, np.int32)
        build_trie(points, starts, ids, self._keys, self._children, self._values)
        if model.is_bpe:
            self._symbols = np.full(_NUM_CODE_POINTS, _UNKNOWN, np.int32)
            single = {ord(text): token_id for text, token_id in entries.items() if len(text) == 1}
            self._symbols[[*single]] = [*single.values()]
            self._pairs, self._merged = np.zeros(num_slots, np.uint64), np.zeros(num_slots, np.int32)
            trie = self._keys, self._children, self._values
            build_pairs(points, starts, ids, *trie, self._pairs, self._merged)
            falling = np.array([-piece.score for piece in model.pieces], np.float32)
            self._ranks = np.unique(falling, return_inverse=True)[1].astype(np.int32)
            defined = {p.text: i for i, p in enumerate(model.pieces) if p.type == USER_DEFINED}
            self._defined = defined
            self._any_defined = regex.compile("|".join(map(regex.escape, sorted(defined, key=len, reverse=True))))
        else:
            scores, self._unknown_score = list_scores(model)
            self._scores = np.array(scores, np.float32)
            self._longest = max(map(len, entries), default=1)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a normalized text."""
        if not text:
            return []
        ids, starts = self._merge(text) if self._is_bpe else self._find_best(text)
        is_unknown = ((ids < 0) & (ids > _FROZEN)) | (ids >= self._size)
        ids = np.where(ids <= _FROZEN, _FROZEN - ids, ids)
        if not is_unknown.any():
            return ids.tolist()
        found, was_unknown = list[int](), False
        for token_id, start, unknown in zip(ids.tolist(), starts.tolist(), is_unknown.tolist(), strict=True):
            if unknown and self._byte_fallback:
                found += map(self._byte_ids.__getitem__, text[start].encode())
            elif not (unknown and was_unknown):  # unknown characters side by side are one token
                found.append(self._unknown_id if unknown else token_id)
            was_unknown = unknown
        return found

    def _merge(self, text: str) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Return the ids of the symbols of a text by BPE, and where they begin."""
        symbols = self._symbols[_pack([text])]
        starts = np.arange(len(text))
        if self._defined:
            is_kept = np.ones(len(text), np.bool_)
            for match in self._any_defined.finditer(text):
                is_kept[match.start() + 1 : match.end()] = False
                symbols[match.start()] = _FROZEN - self._defined[match.group()]
            symbols, starts = symbols[is_kept], starts[is_kept]
        previous, following = np.empty_like(symbols), np.empty_like(symbols)
        heap = np.empty(3 * len(symbols), np.int64)
        merge_pieces(symbols, self._ranks, self._pairs, self._merged, previous, following, heap)
        is_left = symbols != GONE
        return symbols[is_left], starts[is_left]

    def _find_best(self, text: str) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Return the ids of the pieces of a text by a unigram model, and where they begin."""
        points = _pack([text])
        best = np.zeros(len(points) + 1, np.float32)
        origins, ids = np.empty(len(best), np.int32), np.empty(len(best), np.int32)
        trie = self._keys, self._children, self._values
        count = encode_unigram(points, *trie, self._scores, self._longest, self._unknown_score, best, origins, ids)
        return ids[len(ids) - count :], origins[len(ids) - count :].astype(np.int64)


def _pack(texts: list[str]) -> npt.NDArray[np.int32]:
    """Return the code points of all texts."""
    return np.frombuffer("".join(texts).encode("utf-32-le"), np.int32)


def _starts(texts: list[str]) -> npt.NDArray[np.int64]:
    """Return where each text begins among the code points, and where the last ends."""
    return np.cumsum([0, *map(len, texts)], dtype=np.int64)


def _slots(num_entries: int) -> int:
    """Return the slots of a hash table that is at most half full."""
    return 1 << (2 * num_entries + 1).bit_length()
