"""BPE encoding in plain Python: the reference that the compiled encoder is tested against.

It also encodes for the patterns and merges that the compiled encoder does not support.
Source: Sennrich et al. 2016 (BPE).
"""

from collections.abc import Sequence

from lm.text.character_tables import installed_tables, pretokenize_by_tables
from lm.text.utf8 import encode_utf8
from lm.tokenizer.added_tokens import AddedToken, list_added_tokens, number_tokens, split_and_normalize
from lm.tokenizer.formats.tokenizer_config import TokenizerParts
from lm.tokenizer.merges import apply_merges

_MAX_CACHE_ENTRIES = 1 << 18  # about 50 MB
_MAX_CACHED_BYTES = 64  # length of a cached pretoken


class PlainEncoder:
    """Encodes text with ``regex`` and :func:`lm.tokenizer.merges.apply_merges`. Caches the ids of short pretokens.

    Raises KeyError, with the token, if the vocabulary lacks one of the bytes or of the merges.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self._pattern, self._normalizer = parts.pattern, parts.normalizer
        self._tables = parts.character_tables or installed_tables()
        self._added_tokens = list_added_tokens(parts.special_tokens, parts.added_tokens)
        ids, self._added_ids = number_tokens(dict(parts.vocab), self._added_tokens)
        # A pretoken in it is one token, whatever the merges. Text never becomes an added token by this way.
        self._whole_tokens: dict[bytes, int] = {}
        if parts.ignore_merges:
            added = set(self._added_ids.values())
            self._whole_tokens = {token: token_id for token, token_id in ids.items() if token and token_id not in added}
        self._byte_ids = [ids[bytes([byte])] for byte in range(256)]
        self._merges: dict[tuple[int, int], tuple[int, int]] = {}  # pair of ids → (rank, merged id)
        for rank, (left, right) in enumerate(parts.merges):
            self._merges.setdefault((ids[left], ids[right]), (rank, ids[left + right]))
        self._cache: dict[str, list[int]] = {}

    def encode(self, text: str, tokens: Sequence[AddedToken] | None = None) -> list[int]:
        """Return the token ids of ``text``. ``tokens``: the added tokens to search for, by default all."""
        ids: list[int] = []
        tokens = self._added_tokens if tokens is None else tokens
        for is_text, run in split_and_normalize([text], tokens, self._normalizer):
            ids += self.encode_text("".join(run)) if is_text else (self._added_ids[token.content] for token in run)
        return ids

    def encode_text(self, text: str) -> list[int]:
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
