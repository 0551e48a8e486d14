"""Byte-level BPE tokenizer: text to token ids and back.

Sources: Sennrich et al. 2016 (BPE); Radford et al. 2019 (bytes, pretokens); CS336 assignment 1 (section 2.6).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lm.common.errors import UserError
from lm.text.character_tables import PUBLISHED_TABLES, installed_tables, warn_of_other_tables
from lm.text.normalize import check_normalizer
from lm.text.patterns import SEGMENT_PATTERN_NAMES, has_compiled_scanner, resolve_patterns, warn_of_slow_pattern
from lm.text.pretokenize import GPT2_PATTERN, JIEBA, check_special_tokens, split_at_safe_cuts
from lm.text.text_windows import WINDOW
from lm.text.utf8 import decode_utf8_blocks, encode_utf8, encode_utf8_blocks
from lm.tokenizer import array_cache
from lm.tokenizer.added_tokens import (
    AddedToken,
    list_added_tokens,
    number_tokens,
    split_and_normalize,
)
from lm.tokenizer.array_cache import TokenizerArrays, make_arrays
from lm.tokenizer.chat_settings import ChatSettings
from lm.tokenizer.config import MAX_SIZE
from lm.tokenizer.fast_encoder import FastEncoder, can_encode
from lm.tokenizer.formats import tiktoken, tokenizer_config, tokenizer_json, vocab_merges
from lm.tokenizer.formats.tokenizer_config import TokenizerParts
from lm.tokenizer.pattern_process import PatternProcesses, encode_job, map_pieces
from lm.tokenizer.reference import PlainEncoder
from lm.tokenizer.selected_tokens import SelectedTokens
from lm.tokenizer.superword_encoder import SuperwordEncoder

LLAMA3_BEGIN = "<|begin_of_text|>"
_MIN_CACHED_SIZE = 1 << 13  # tokens; fewer are read in some 30 ms


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """Return the dtype of token files: little-endian uint16, or uint32 if ids exceed 65,535."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


class Tokenizer:
    """Encodes text with a vocabulary and its merges.

    ``vocab`` maps ids to bytes and holds all 256 single bytes. ``merges`` are pairs of byte strings in the order in
    which they were learned. Special tokens missing from the vocabulary are appended to it. If special tokens overlap in
    a text, the leftmost is encoded, and of several at one position the longest. ``pattern`` is a regular expression, a
    name in :data:`lm.text.patterns.PATTERNS`, or jieba for Chinese words; or a sequence of them, each of which splits
    the pretokens of the one before. ``ignore_merges``: a pretoken that is in the vocabulary, and not an added token,
    is one token even if the merges do not make it (Llama 3). ``normalizer``: the normalization form of the text between
    special tokens, such as "NFC" (Qwen); decoding does not undo it. ``added_tokens``: tokens that are found like
    special tokens, but are not special or have flags. ``begin_token``: the special token that the model has seen before
    each text; ``encode`` leaves it to the caller. Llama 3's ``<|begin_of_text|>`` is one by its name.
    ``character_tables``: the classes of all characters by which text is split, see :mod:`lm.text.character_tables`; by
    default those of the installed ``regex``. Files of other libraries get those of Unicode 16, as these libraries have.
    ``chat``: what the files of a published model say about its dialogs.

    Raises UserError if the vocabulary lacks a token of the merges, an id is too large, or a token is invalid.
    """

    _fast_encoder: FastEncoder | SuperwordEncoder | None = None
    _arrays: TokenizerArrays  # if there is a fast encoder

    def __init__(
        self,
        vocab: dict[int, bytes],
        merges: Sequence[tuple[bytes, bytes]],
        special_tokens: Sequence[str] | None = None,
        pattern: str | Sequence[str] = GPT2_PATTERN,
        ignore_merges: bool = False,
        normalizer: str | None = None,
        added_tokens: Sequence[AddedToken] = (),
        begin_token: str | None = None,
        character_tables: str | None = None,
        chat: ChatSettings | None = None,
    ) -> None:
        options = ignore_merges, normalizer, added_tokens, begin_token, character_tables, chat
        self._set_options(TokenizerParts({}, [], special_tokens or (), resolve_patterns(pattern), *options))
        self.vocab, self.merges = dict(vocab), list(merges)
        ids, self.added_ids = number_tokens(self.vocab, self.added_tokens)
        if not self.vocab or min(self.vocab) < 0:
            raise UserError("The vocabulary is empty or has a negative token id; number tokens from 0.")
        self.size = max(self.vocab) + 1
        if self.size > MAX_SIZE:
            raise UserError(f"The token id {self.size - 1} exceeds the limit of {MAX_SIZE - 1}; number tokens from 0.")
        if any(not left or not right for left, right in self.merges):
            raise UserError("A merge has an empty part; leave it out.")
        try:
            if has_compiled_scanner(self.pattern):
                added = set(self.added_ids.values()) if ignore_merges else None
                arrays = make_arrays(self.vocab, ids, self.merges, added)
                if can_encode(arrays) and not (ignore_merges and self.pattern in SEGMENT_PATTERN_NAMES):
                    self._use_arrays(arrays)
            if not self._fast_encoder:
                self._plain_encoder  # noqa: B018
        except KeyError as error:
            raise UserError(
                f"The vocabulary lacks the token {error.args[0]!r}, which the bytes or the merges need; "
                "use the vocabulary and the merges of the same tokenizer."
            ) from None

    def _set_options(self, parts: TokenizerParts) -> None:
        self.ignore_merges = parts.ignore_merges
        self.normalizer = check_normalizer(parts.normalizer)
        self.pattern = parts.pattern
        self.character_tables = parts.character_tables or installed_tables()
        self.chat = parts.chat
        self.added_tokens = list_added_tokens(parts.special_tokens, parts.added_tokens)
        self.special_tokens = [token.content for token in self.added_tokens if token.special]
        begin = parts.begin_token
        if begin is not None and begin not in self.special_tokens:
            raise UserError(f"The begin_token {begin!r} is not a special token; add it to the special tokens.")
        self.begin_token = begin or (LLAMA3_BEGIN if LLAMA3_BEGIN in self.special_tokens else None)
        self._selections: dict[frozenset[str] | None, SelectedTokens] = {}

    def _use_arrays(self, arrays: TokenizerArrays) -> None:
        self._arrays = arrays
        encoder = SuperwordEncoder if self.pattern in SEGMENT_PATTERN_NAMES else FastEncoder
        self._fast_encoder = encoder(arrays, token_dtype(self.size), self.pattern, self.character_tables)

    @classmethod
    def from_files(
        cls,
        vocab_path: str | Path,
        merges_path: str | Path,
        special_tokens: Sequence[str] | None = None,
        pattern: str | Sequence[str] = GPT2_PATTERN,
    ) -> "Tokenizer":
        """Read a vocab.json and a merges.txt in GPT-2's format."""
        check_special_tokens(special_tokens or ())
        vocab_path, merges_path, specials = Path(vocab_path), Path(merges_path), list(special_tokens or ())

        def read() -> TokenizerParts:
            vocab = vocab_merges.read_vocab(vocab_path, specials)
            parts = TokenizerParts(vocab, vocab_merges.read_merges(merges_path), specials, resolve_patterns(pattern))
            return parts._replace(character_tables=PUBLISHED_TABLES)

        return cls._read(read, [vocab_path, merges_path], "gpt2", specials, pattern)

    @classmethod
    def load(cls, directory: str | Path) -> "Tokenizer":
        """Read a directory written by :meth:`save`, with all options."""
        config, vocab = Path(directory, "tokenizer_config.json"), Path(directory, "vocab.json")
        merges = Path(directory, "merges.txt")

        def read() -> TokenizerParts:
            parts = tokenizer_config.read_config(config)
            contents = [*parts.special_tokens, *(token.content for token in parts.added_tokens)]
            return parts._replace(
                vocab=vocab_merges.read_vocab(vocab, contents), merges=vocab_merges.read_merges(merges)
            )

        return cls._read(read, [config, vocab, merges], "textmill")

    def save(self, directory: str | Path) -> None:
        """Write vocab.json and merges.txt (GPT-2), tokenizer.json (Hugging Face; not with jieba, which it cannot
        express), vocab.txt (readable) and tokenizer_config.json (the other options)."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        vocab_merges.write_vocab(directory / "vocab.json", self.vocab, self.added_ids)
        vocab_merges.write_merges(directory / "merges.txt", self.merges)
        if JIEBA not in ((self.pattern,) if isinstance(self.pattern, str) else self.pattern):
            self.save_tokenizer_json(directory / "tokenizer.json")
        else:
            (directory / "tokenizer.json").unlink(missing_ok=True)  # of an earlier tokenizer
        vocab_merges.write_vocab_text(directory / "vocab.txt", self.vocab, self.merges)
        tokenizer_config.write_config(directory / "tokenizer_config.json", self.parts)

    @classmethod
    def from_tiktoken(
        cls, path: str | Path, special_tokens: Mapping[str, int] | None = None, pattern: str = GPT2_PATTERN
    ) -> "Tokenizer":
        """Read tiktoken's rank file. The file holds neither the special tokens (text to id) nor the pattern."""
        path, specials = Path(path), {token: int(token_id) for token, token_id in (special_tokens or {}).items()}

        def read() -> TokenizerParts:
            vocab, merges, ignore_merges = tiktoken.read_tiktoken(path)
            for token, token_id in specials.items():
                if vocab.setdefault(token_id, token.encode()) != token.encode():
                    raise UserError(f"{path} has another token with the id {token_id} of the special token {token!r}.")
            parts = TokenizerParts(vocab, merges, list(specials), pattern, ignore_merges)
            return parts._replace(character_tables=PUBLISHED_TABLES)

        return cls._read(read, [path], "tiktoken", list(specials.items()), pattern)

    @classmethod
    def from_tokenizer_json(cls, path: str | Path) -> "Tokenizer":
        """Read Hugging Face's tokenizer.json of a byte-level BPE. Raises UserError, by name, for what is not
        supported."""
        path, ignored = Path(path), list[str]()
        read = partial(tokenizer_json.read_tokenizer_json, path, ignored)
        tokenizer = cls._read(read, [path], "hugging_face", ignored=ignored)
        tokenizer_json.warn_of_ignored(path, ignored)
        return tokenizer

    def save_tiktoken(self, path: str | Path) -> None:
        """Write tiktoken's rank file. Raises UserError if tiktoken would encode differently, as with a normalizer,
        flags of tokens, or ids that are not in the order of the merges."""
        if self.normalizer or not self._select_added_tokens("all").needs_no_context:
            raise UserError(
                f"{path} was not written: tiktoken has no normalizer and no flags of added tokens, as this tokenizer "
                "has; use tokenizer.json."
            )
        tiktoken.write_tiktoken(Path(path), self.vocab, self.added_ids, self.merges, self.ignore_merges)

    def save_tokenizer_json(self, path: str | Path) -> None:
        """Write Hugging Face's tokenizer.json. Raises UserError for jieba and for two tokens of the same text."""
        tokenizer_json.write_tokenizer_json(Path(path), self.parts)

    @property
    def parts(self) -> TokenizerParts:
        """The arguments that make this tokenizer."""
        options = self.special_tokens, self.pattern, self.ignore_merges, self.normalizer
        flagged = [token for token in self.added_tokens if token != AddedToken(token.content)]
        tables = self.character_tables
        return TokenizerParts(self.vocab, self.merges, *options, flagged, self.begin_token, tables, self.chat)

    def encode(self, text: str, allowed_special: Literal["all"] | Collection[str] = "all") -> list[int]:
        """Return the token ids of ``text``. Special tokens outside ``allowed_special`` are encoded as plain text.

        Lone surrogates, which have no UTF-8 bytes, are encoded as U+FFFD.
        """
        arrays = list(self.encode_blocks([encode_utf8(text)], allowed_special))
        return np.concatenate(arrays).tolist() if arrays else []

    def encode_iterable(self, iterable: Iterable[str]) -> Iterator[int]:
        """Lazily yield the token ids of the concatenated strings, with about 4,096 bytes of text in memory."""
        for ids in self.encode_blocks(encode_utf8_blocks(iterable), window=1 << 12):
            yield from ids.tolist()

    def encode_blocks(
        self, blocks: Iterable[bytes], allowed_special: Literal["all"] | Collection[str] = "all", window: int = WINDOW
    ) -> Iterator[npt.NDArray[np.unsignedinteger]]:
        """Lazily yield the token ids of the concatenated ``blocks`` of UTF-8 text.

        Each array holds the ids of about ``window`` bytes; its dtype is :func:`token_dtype`. Raises UserError if the
        text is not UTF-8.
        """
        selected = self._select_added_tokens(allowed_special)
        warn_of_slow_pattern(self.pattern)
        if self.normalizer is None and selected.needs_no_context:
            yield from self._encode_simple(blocks, selected, window)
            return
        if selected.composer:
            yield from self._encode_simple(selected.composer.compose(blocks), selected, window)
            return
        no_tokens = SelectedTokens([], {}, None)
        for is_simple, piece in selected.splitter.split(decode_utf8_blocks(blocks, "the text"), window):
            if is_simple:
                yield from self._encode_simple(map(encode_utf8, piece), selected, window)
                continue
            for is_text, run in split_and_normalize(piece, selected.tokens, self.normalizer):
                if is_text:
                    yield from self._encode_simple(map(encode_utf8, run), no_tokens, window)
                else:
                    yield np.array([self.added_ids[token.content] for token in run], token_dtype(self.size))

    def segment_encoder(self) -> SuperwordEncoder:
        """Return the compiled encoder of a pattern of segments. Raises UserError for another pattern or too many
        merges."""
        if isinstance(self._fast_encoder, SuperwordEncoder):
            return self._fast_encoder
        raise UserError("Superwords need a pattern of segments and fewer merges; choose a smaller vocab_size.")

    def _encode_simple(
        self, blocks: Iterable[bytes | memoryview], selected: SelectedTokens, window: int
    ) -> Iterator[npt.NDArray[np.unsignedinteger]]:
        """Encode normalized text whose added tokens need no context. By plain Python, encode a long text in another
        process."""
        if self._fast_encoder:
            yield from self._fast_encoder.encode(blocks, selected.specials, window)
            return
        contents = [token.content for token in selected.tokens]
        dtype = token_dtype(self.size)
        pieces = split_at_safe_cuts(decode_utf8_blocks(blocks, "the text"), contents, self.pattern, window)

        def encode(piece: str) -> npt.NDArray[np.unsignedinteger]:
            return np.array(self._plain_encoder.encode(piece, selected.tokens), dtype)

        if selected.tokens != self.added_tokens:  # the processes know no other choice
            yield from map(encode, pieces)
        else:
            processes = self._pattern_processes
            yield from map_pieces(pieces, encode, processes, lambda ids: np.frombuffer(ids, np.uint32).astype(dtype))

    def encode_reference(self, text: str, allowed_special: Literal["all"] | Collection[str] = "all") -> list[int]:
        """Return the same as :meth:`encode` by plain Python; see :mod:`lm.tokenizer.reference`."""
        return self._plain_encoder.encode(text, self._select_added_tokens(allowed_special).tokens)

    def decode(self, ids: Iterable[int], errors: str = "replace") -> str:
        """Return the text of ``ids``. ``errors`` is the error handler of :meth:`bytes.decode` for invalid UTF-8.

        Raises UserError for an id outside the vocabulary.
        """
        return self.decode_bytes(ids).decode("utf-8", errors)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Return the bytes of ``ids``. Raises UserError for an id outside the vocabulary."""
        try:
            return b"".join(map(self.vocab.__getitem__, ids))
        except KeyError as error:
            raise UserError(
                f"Token id {error.args[0]} is not in the vocabulary of {self.size:,}; "
                "decode with the tokenizer that encoded the text."
            ) from None

    def _select_added_tokens(self, allowed_special: Literal["all"] | Collection[str]) -> SelectedTokens:
        """Return the added tokens without the special tokens that are not allowed."""
        key = None if allowed_special == "all" else frozenset(allowed_special)
        if key not in self._selections:
            if unknown := [token for token in allowed_special if key is not None and token not in self.special_ids]:
                raise UserError(f"{unknown[0]!r} is not a special token; this tokenizer has {self.special_tokens}.")
            tokens = [token for token in self.added_tokens if key is None or not token.special or token.content in key]
            self._selections[key] = SelectedTokens(tokens, self.added_ids, self.normalizer)
        return self._selections[key]

    @classmethod
    def _read(
        cls, read: Callable[[], TokenizerParts], paths: Sequence[Path], *settings: Any, ignored: list[str] | None = None
    ) -> "Tokenizer":
        """Return the tokenizer of ``read()``, which depends on the files ``paths`` and on ``settings``, JSON only.

        A large one is kept in the user's cache, in a form that is fast to read; see :mod:`lm.tokenizer.array_cache`.
        ``read`` may extend ``ignored``; a tokenizer from the cache extends it likewise.
        """
        settings = *settings, version("regex")  # older files of a tokenizer have no tables
        key = array_cache.find_key(paths, *settings)
        if key and (arrays := array_cache.read_arrays(key)):
            tokenizer = cls._from_arrays(arrays)
            if ignored is not None:
                ignored += arrays.options["ignored"]
        else:
            tokenizer = cls(*read())
            is_cached = tokenizer._fast_encoder and len(tokenizer.vocab) >= _MIN_CACHED_SIZE
            if key and is_cached and array_cache.find_key(paths, *settings) == key:  # else the files changed meanwhile
                array_cache.write_arrays(key, tokenizer._to_arrays(ignored))
        warn_of_other_tables(tokenizer.character_tables, tokenizer.pattern)
        return tokenizer

    def _to_arrays(self, ignored: list[str] | None) -> TokenizerArrays:
        options = tokenizer_config.format_config(self.parts) | {"added_ids": self.added_ids, "ignored": ignored}
        return self._arrays._replace(options=options)

    @classmethod
    def _from_arrays(cls, arrays: TokenizerArrays) -> "Tokenizer":
        self = cls.__new__(cls)
        self._set_options(tokenizer_config.parse_config(arrays.options))
        self.added_ids = arrays.options["added_ids"]
        self.size = int(arrays.ids.max()) + 1
        self._use_arrays(arrays)
        return self

    @cached_property
    def vocab(self) -> dict[int, bytes]:
        """The bytes of each token id."""
        return self._arrays.vocab()

    @cached_property
    def merges(self) -> list[tuple[bytes, bytes]]:
        """The merges, in the order in which they were learned."""
        return self._arrays.merge_pairs()

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """The ids of the special tokens."""
        return {special: self.added_ids[special] for special in self.special_tokens}

    @property
    def stop_ids(self) -> frozenset[int]:
        """The ids that end a generation: those that the model's files name, or else all special tokens."""
        return frozenset((self.chat and self.chat.end_ids) or self.special_ids.values())

    @cached_property
    def _plain_encoder(self) -> PlainEncoder:
        return PlainEncoder(self.parts)

    @cached_property
    def _pattern_processes(self) -> PatternProcesses:
        parts = self.parts  # not a reference to self, which ends the processes when it is not used any more
        return PatternProcesses(lambda: encode_job(parts))
