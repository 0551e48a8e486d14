"""Byte-level BPE tokenizer: text to token ids and back.

Sources: Sennrich et al. 2016 (BPE); Radford et al. 2019 (bytes, pretokens); CS336 assignment 1 (section 2.6).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lm.common.errors import UserError
from lm.kernels.bpe.pretokens import Specials, pack_specials
from lm.text.character_tables import PUBLISHED_TABLES, installed_tables, warn_of_other_tables
from lm.text.normalize import check_normalizer
from lm.text.patterns import has_compiled_scanner, resolve_patterns, warn_of_slow_pattern
from lm.text.pretokenize import GPT2_PATTERN, JIEBA, check_special_tokens, split_at_safe_cuts
from lm.text.text_windows import WINDOW
from lm.text.utf8 import decode_utf8_blocks, encode_utf8, encode_utf8_blocks
from lm.tokenizer import array_cache
from lm.tokenizer.added_tokens import AddedToken, is_found_anywhere, split_and_normalize
from lm.tokenizer.array_cache import TokenizerArrays
from lm.tokenizer.config import MAX_SIZE
from lm.tokenizer.fast_encoder import FastEncoder
from lm.tokenizer.formats import tiktoken, tokenizer_config, tokenizer_json, vocab_merges
from lm.tokenizer.formats.tokenizer_config import TokenizerParts
from lm.tokenizer.pattern_process import PatternProcesses, encode_job, map_pieces
from lm.tokenizer.plain_pieces import PlainPieces
from lm.tokenizer.reference import ReferenceEncoder

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

    Raises UserError if the vocabulary lacks a token of the merges, an id is too large, or a token is invalid.
    """

    _fast_encoder: FastEncoder | None = None
    _arrays: TokenizerArrays  # of a tokenizer from the cache

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
    ) -> None:
        self.vocab = dict(vocab)
        self.merges = list(merges)
        options = pattern, ignore_merges, normalizer, added_tokens, begin_token, character_tables
        self._set_options(special_tokens or (), *options)
        self._text_ids, self._added_ids = self._number_tokens()
        if not self.vocab or min(self.vocab) < 0:
            raise UserError("The vocabulary is empty or has a negative token id; number tokens from 0.")
        self.size = max(self.vocab) + 1
        if self.size > MAX_SIZE:
            raise UserError(f"The token id {self.size - 1} exceeds the limit of {MAX_SIZE - 1}; number tokens from 0.")
        if any(not left or not right for left, right in self.merges):
            raise UserError("A merge has an empty part; leave it out.")
        if has_compiled_scanner(self.pattern):
            self._fast_encoder = FastEncoder.from_merges(
                self._text_ids,
                self.merges,
                token_dtype(self.size),
                self.pattern,
                self._whole_tokens,
                self.character_tables,
            )
        if not self._fast_encoder:
            try:
                self._reference_encoder  # noqa: B018
            except KeyError as error:
                raise UserError(
                    f"The vocabulary lacks the token {error.args[0]!r}, which the bytes or the merges need; "
                    "use the vocabulary and the merges of the same tokenizer."
                ) from None

    def _set_options(
        self,
        special_tokens: Sequence[str],
        pattern: str | Sequence[str],
        ignore_merges: bool,
        normalizer: str | None,
        added_tokens: Sequence[AddedToken],
        begin_token: str | None,
        character_tables: str | None,
    ) -> None:
        self.ignore_merges = ignore_merges
        self.normalizer = check_normalizer(normalizer)
        self.pattern = resolve_patterns(pattern)
        self.character_tables = character_tables or installed_tables()
        check_special_tokens(special_tokens)
        given = {token.content: token for token in added_tokens}
        others = [token.content for token in added_tokens if token.content not in special_tokens]
        contents = [*special_tokens, *others]
        check_special_tokens(contents)
        tokens = [given.get(content, AddedToken(content)) for content in contents]
        self.added_tokens = sorted(tokens, key=lambda token: not token.special)
        self.special_tokens = [token.content for token in self.added_tokens if token.special]
        if begin_token is not None and begin_token not in self.special_tokens:
            raise UserError(f"The begin_token {begin_token!r} is not a special token; add it to the special tokens.")
        self.begin_token = begin_token or (LLAMA3_BEGIN if LLAMA3_BEGIN in self.special_tokens else None)
        self._has_plain_tokens = is_found_anywhere(self.added_tokens, self.normalizer)
        self._packed_tokens: dict[tuple[str, ...], Specials] = {}
        self._plain_pieces: dict[tuple[str, ...], PlainPieces] = {}

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
        vocab_merges.write_vocab(directory / "vocab.json", self.vocab, self._added_ids)
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
        if self.normalizer or not self._has_plain_tokens:
            raise UserError(
                f"{path} was not written: tiktoken has no normalizer and no flags of added tokens, as this tokenizer "
                "has; use tokenizer.json."
            )
        tiktoken.write_tiktoken(Path(path), self.vocab, self._added_ids, self.merges, self.ignore_merges)

    def save_tokenizer_json(self, path: str | Path) -> None:
        """Write Hugging Face's tokenizer.json. Raises UserError for jieba and for two tokens of the same text."""
        tokenizer_json.write_tokenizer_json(Path(path), self.parts)

    @property
    def parts(self) -> TokenizerParts:
        """The arguments that make this tokenizer."""
        options = self.special_tokens, self.pattern, self.ignore_merges, self.normalizer
        flagged = [token for token in self.added_tokens if token != AddedToken(token.content)]
        return TokenizerParts(self.vocab, self.merges, *options, flagged, self.begin_token, self.character_tables)

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
        tokens = self._select_added_tokens(allowed_special)
        if self._has_plain_tokens and self.normalizer is None:
            yield from self._encode_raw(blocks, tokens, window)
            return
        texts = decode_utf8_blocks(blocks, "the text")
        if self._fast_encoder is None:
            yield from self._encode_parts(texts, tokens, window)
            return
        if (key := tuple(token.content for token in tokens)) not in self._plain_pieces:
            self._plain_pieces[key] = PlainPieces(tokens, self.normalizer)
        for is_plain, piece in self._plain_pieces[key].split(texts, window):
            if is_plain:
                yield from self._encode_raw(map(encode_utf8, piece), tokens, window)
            else:
                yield from self._encode_parts(piece, tokens, window)

    def _encode_raw(
        self, blocks: Iterable[bytes], tokens: Sequence[AddedToken], window: int
    ) -> Iterator[npt.NDArray[np.unsignedinteger]]:
        """Encode normalized text whose added tokens have no flags."""
        if self._fast_encoder is None:
            yield from self._encode_pieces(blocks, tokens, window)
            return
        if (key := tuple(token.content for token in tokens)) not in self._packed_tokens:
            self._packed_tokens[key] = pack_specials([(text.encode(), self._added_ids[text]) for text in key])
        yield from self._fast_encoder.encode(blocks, self._packed_tokens[key], window)

    def _encode_pieces(
        self, blocks: Iterable[bytes], tokens: Sequence[AddedToken], window: int
    ) -> Iterator[npt.NDArray[np.unsignedinteger]]:
        """Encode by plain Python normalized text whose added tokens have no flags; a long text in another process."""
        warn_of_slow_pattern(self.pattern)
        dtype, contents = token_dtype(self.size), [token.content for token in tokens]
        pieces = split_at_safe_cuts(decode_utf8_blocks(blocks, "the text"), contents, self.pattern, window)
        if tokens != self.added_tokens:  # the processes know no other choice
            for piece in pieces:
                yield np.array(self._encode_plainly(piece, tokens), dtype)
            return
        yield from map_pieces(
            pieces,
            lambda piece: np.array(self._encode_plainly(piece, tokens), dtype),
            self._pattern_processes,
            lambda answer: np.frombuffer(answer, np.uint32).astype(dtype),
        )

    def _encode_parts(
        self, blocks: Iterable[str], tokens: Sequence[AddedToken], window: int
    ) -> Iterator[npt.NDArray[np.unsignedinteger]]:
        """Encode any text, each run between two added tokens by itself."""
        parts = split_and_normalize(blocks, tokens, self.normalizer)
        dtype = token_dtype(self.size)
        for is_text, run in groupby(parts, key=lambda part: isinstance(part, str)):
            if not is_text:
                yield np.array([self._added_ids[part.content] for part in run if isinstance(part, AddedToken)], dtype)
                continue
            texts = (part for part in run if isinstance(part, str))
            if self._fast_encoder:
                yield from self._fast_encoder.encode(map(encode_utf8, texts), pack_specials([]), window)
                continue
            warn_of_slow_pattern(self.pattern)
            for piece in split_at_safe_cuts(texts, [], self.pattern, window):
                yield np.array(self._reference_encoder.encode(piece), dtype)

    def encode_reference(self, text: str, allowed_special: Literal["all"] | Collection[str] = "all") -> list[int]:
        """Return the same as :meth:`encode` by plain Python; see :mod:`lm.tokenizer.reference`."""
        return self._encode_plainly(text, self._select_added_tokens(allowed_special))

    def _encode_plainly(self, text: str, tokens: Sequence[AddedToken]) -> list[int]:
        ids: list[int] = []
        parts = split_and_normalize([text], tokens, self.normalizer)
        for is_text, run in groupby(parts, key=lambda part: isinstance(part, str)):
            if is_text:
                ids += self._reference_encoder.encode("".join(part for part in run if isinstance(part, str)))
            else:
                ids += [self._added_ids[part.content] for part in run if isinstance(part, AddedToken)]
        return ids

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

    def _select_added_tokens(self, allowed_special: Literal["all"] | Collection[str]) -> list[AddedToken]:
        """Return the added tokens without the special tokens that are not allowed."""
        if allowed_special == "all":
            return self.added_tokens
        if unknown := [token for token in allowed_special if token not in self.special_ids]:
            raise UserError(f"{unknown[0]!r} is not a special token; this tokenizer has {self.special_tokens}.")
        return [token for token in self.added_tokens if not token.special or token.content in allowed_special]

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
            if ignored is not None:
                ignored += arrays.options["ignored"]
            tokenizer = cls._from_arrays(arrays)
            warn_of_other_tables(tokenizer.character_tables, tokenizer.pattern)
            return tokenizer
        tokenizer = cls(*read())
        warn_of_other_tables(tokenizer.character_tables, tokenizer.pattern)
        if key and tokenizer._fast_encoder and len(tokenizer.vocab) >= _MIN_CACHED_SIZE:
            options = tokenizer_config.format_config(tokenizer.parts)
            options |= {"added_ids": tokenizer._added_ids, "ignored": ignored}
            tables = tokenizer.vocab, tokenizer._text_ids, tokenizer.merges, tokenizer._fast_encoder.used_merges
            arrays = array_cache.make_arrays(*tables, options)
            if array_cache.find_key(paths, *settings) == key:  # else the files changed while they were read
                array_cache.write_arrays(key, arrays)
        return tokenizer

    @classmethod
    def _from_arrays(cls, arrays: TokenizerArrays) -> "Tokenizer":
        self = cls.__new__(cls)
        self._arrays = arrays
        self._set_options(*tokenizer_config.parse_config(arrays.options)[2:])
        self._added_ids = arrays.options["added_ids"]
        self.size = int(arrays.ids.max()) + 1
        options = token_dtype(self.size), self.pattern, list(self._added_ids.values()), self.character_tables
        self._fast_encoder = FastEncoder.from_arrays(arrays, *options)
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
    def _text_ids(self) -> dict[bytes, int]:
        """The ids of the tokens that text can become."""
        return self._arrays.text_ids()

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """The ids of the special tokens."""
        return {special: self._added_ids[special] for special in self.special_tokens}

    def _number_tokens(self) -> tuple[dict[bytes, int], dict[str, int]]:
        """Return the ids by bytes and those of the added tokens by text; append added tokens that have none to the
        vocabulary."""
        own_ids = {token.id for token in self.added_tokens if token.id is not None}
        last_ids = {token: token_id for token_id, token in self.vocab.items() if token_id not in own_ids}
        contents = {token.content.encode() for token in self.added_tokens}
        # Of two ids with the bytes of an added token the later is the added one; text becomes the earlier.
        first_ids = {token: i for i, token in reversed(self.vocab.items()) if i not in own_ids and token in contents}
        ids, added_ids = last_ids | first_ids, dict[str, int]()
        for token in self.added_tokens:
            data = token.content.encode()
            token_id = last_ids.get(data) if token.id is None else token.id
            if token_id is None:
                token_id = max(self.vocab, default=-1) + 1
            if self.vocab.setdefault(token_id, data) != data:
                raise UserError(
                    f"The id {token_id} of the added token {token.content!r} is that of {self.vocab[token_id]!r}; "
                    "choose another id."
                )
            added_ids[token.content] = token_id
            ids.setdefault(data, token_id)
        return ids, added_ids

    @cached_property
    def _reference_encoder(self) -> ReferenceEncoder:
        options = self.pattern, self._whole_tokens, self.character_tables
        return ReferenceEncoder(self._text_ids, self.merges, *options)

    @cached_property
    def _pattern_processes(self) -> PatternProcesses:
        parts = self.parts  # not a reference to self, which ends the processes when it is not used any more
        return PatternProcesses(lambda: encode_job(parts))

    @property
    def _whole_tokens(self) -> dict[bytes, int]:
        """The tokens that a pretoken becomes whatever the merges. Text never becomes an added token by this way."""
        if not self.ignore_merges:
            return {}
        added = set(self._added_ids.values())
        return {token: token_id for token, token_id in self._text_ids.items() if token and token_id not in added}
