"""Textbook BPE in plain Python: the references for training and encoding."""

import itertools
from collections import Counter
from collections.abc import Mapping

from lm.text.pretokenize import pretokenize, split_special_tokens
from lm.tokenizer.bpe import Merges
from lm.tokenizer.tokenizer import Tokenizer


def naive_merges(counts: Mapping[bytes, int], max_merges: int, min_frequency: int = 1) -> Merges:
    """Learn merges from pretoken counts; count all pairs again before each merge."""
    words = [([bytes([byte]) for byte in pretoken], count) for pretoken, count in counts.items()]
    return _merge_words(words, max_merges, min_frequency)


def naive_superwords(
    text: str, merges: Merges, max_merges: int, special_tokens: list[str], pattern: str, share: int
) -> Merges:
    """Learn merges in the segments of a text, after ``merges``. A pair occurs at least once in ``share`` tokens."""
    vocab = {i: bytes([i]) for i in range(256)}
    vocab |= {256 + i: left + right for i, (left, right) in enumerate(merges)}
    tokenizer = Tokenizer(vocab, merges, special_tokens, pattern)
    segments: list[tuple[list[bytes], int]] = []
    for piece, is_special in split_special_tokens(text, special_tokens):
        texts = [piece] if is_special else pretokenize(piece, pattern)
        for segment in texts:
            ids = naive_encode(tokenizer, segment, special_tokens)
            segments.append(([tokenizer.vocab[i] for i in ids], 1))
    total = sum(len(tokens) for tokens, _ in segments)
    return merges + _merge_words(segments, max_merges, max(1, total // share))


def _merge_words(words: list[tuple[list[bytes], int]], max_merges: int, min_frequency: int) -> Merges:
    merges: Merges = []
    while len(merges) < max_merges:
        pairs: Counter[tuple[bytes, bytes]] = Counter()
        for word, count in words:
            for pair in itertools.pairwise(word):
                pairs[pair] += count
        best = max(pairs, key=lambda pair: (pairs[pair], pair), default=None)
        if best is None or pairs[best] < min_frequency:
            break
        merges.append(best)
        for word, _ in words:
            i = 0
            while i < len(word) - 1:
                if (word[i], word[i + 1]) == best:
                    word[i : i + 2] = [word[i] + word[i + 1]]
                i += 1
    return merges


def naive_encode(tokenizer: Tokenizer, text: str, special_tokens: list[str]) -> list[int]:
    """Encode ``text``: merge the leftmost pair of the lowest rank, then look at all pairs again."""
    token_ids = {token: token_id for token_id, token in tokenizer.vocab.items()}
    ranks = {pair: rank for rank, pair in reversed(list(enumerate(tokenizer.merges)))}
    whole = token_ids.keys() - {special.encode() for special in tokenizer.special_tokens}
    ids: list[int] = []
    for piece, is_special in split_special_tokens(text, special_tokens):
        if is_special:
            ids.append(token_ids[piece.encode()])
            continue
        for pretoken in pretokenize(piece, tokenizer.pattern):
            word = [bytes([byte]) for byte in pretoken.encode()]
            if tokenizer.ignore_merges and pretoken.encode() in whole:
                word = [pretoken.encode()]
            while pairs := [(ranks[pair], i) for i, pair in enumerate(itertools.pairwise(word)) if pair in ranks]:
                _, i = min(pairs)
                word[i : i + 2] = [word[i] + word[i + 1]]
            ids += [token_ids[token] for token in word]
    return ids
