"""Tokenizers as arrays, in files of the user's cache: reading the text files of a vocabulary takes ten times as long.

The name of a file is a digest of all that makes the tokenizer, code included, so it is never out of date.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from lm.files.cache_dir import cache_directory
from lm.kernels.jit import Bytes, Int32s, Int64s

_MAX_FILES = 32  # 1 MB for GPT-2's tokenizer; the least recently used are removed
_DIGEST_BYTES = 32


class TokenizerArrays(NamedTuple):
    """The tokens, the merges and the options of a tokenizer."""

    data: Bytes  # the bytes of all tokens
    ends: Int64s  # (tokens + 1,): where they end in ``data``, from 0
    ids: Int32s  # (tokens,)
    is_text: Bytes  # (tokens,): 1 if the bytes of a token have its id, 0 if they have another token's
    merges: Int32s  # (merges, 3): ids of the left, the right and the merged token
    used: Int32s  # the ranks of the merges that can happen
    options: dict[str, Any]  # JSON; see lm.tokenizer.formats.tokenizer_config

    @property
    def ignore_merges(self) -> bool:
        """See :class:`lm.tokenizer.tokenizer.Tokenizer`."""
        return bool(self.options.get("ignore_merges"))

    def vocab(self) -> dict[int, bytes]:
        """Return the tokens by id."""
        return dict(zip(self.ids.tolist(), self._tokens(), strict=True))

    def text_ids(self) -> dict[bytes, int]:
        """Return the ids by bytes."""
        pairs = zip(self._tokens(), self.ids.tolist(), self.is_text.tolist(), strict=True)
        return {token: token_id for token, token_id, is_text in pairs if is_text}

    def merge_pairs(self) -> list[tuple[bytes, bytes]]:
        """Return the parts of the merges, in their order."""
        vocab = self.vocab()
        return [(vocab[left], vocab[right]) for left, right in self.merges[:, :2].tolist()]

    def _tokens(self) -> list[bytes]:
        data, ends = self.data.tobytes(), self.ends.tolist()
        return [data[start:end] for start, end in zip(ends, ends[1:], strict=False)]


def make_arrays(
    vocab: dict[int, bytes],
    ids: dict[bytes, int],
    merges: Sequence[tuple[bytes, bytes]],
    used: Int32s,
    options: dict[str, Any],
) -> TokenizerArrays:
    """Return the arrays of tokens by id, ids by bytes, merges, their ranks that can happen, and options."""
    ends = np.cumsum([0, *map(len, vocab.values())])
    is_text = np.array([ids[token] == token_id for token_id, token in vocab.items()], np.uint8)
    rows = [(ids[left], ids[right], ids[left + right]) for left, right in merges]
    data = np.frombuffer(b"".join(vocab.values()), np.uint8)
    ids_array, merge_array = np.array(list(vocab), np.int32), np.array(rows, np.int32).reshape(-1, 3)
    return TokenizerArrays(data, ends, ids_array, is_text, merge_array, used, options)


def find_key(paths: Sequence[Path], *settings: Any) -> str | None:
    """Return the name of the file for a tokenizer of these files and settings (JSON); None if a file is not there."""
    digest = hashlib.sha256(_source_digest() + json.dumps(settings).encode())
    for path in paths:
        try:
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        except OSError:
            return None
    return digest.hexdigest()


def read_arrays(key: str) -> TokenizerArrays | None:
    """Return the arrays of a file, or None if it is not there or is damaged."""
    path = _directory() / key
    try:
        digest, content = (data := path.read_bytes())[:_DIGEST_BYTES], memoryview(data)[_DIGEST_BYTES:]
        if hashlib.sha256(content).digest() != digest:
            return None
        arrays = load(bytes(content))
        options = json.loads(arrays.pop("options").tobytes())
    except (OSError, ValueError, KeyError, SafetensorError):
        return None
    with suppress(OSError):
        os.utime(path)
    return TokenizerArrays(**arrays, options=options)


def write_arrays(key: str, arrays: TokenizerArrays) -> None:
    """Write a file, if the cache is writable."""
    options = np.frombuffer(json.dumps(arrays.options).encode(), np.uint8)
    content = save(arrays._asdict() | {"options": options})
    path = _directory() / key
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{key}.{os.getpid()}")
        temporary.write_bytes(hashlib.sha256(content).digest() + content)
        temporary.replace(path)
        files = sorted(path.parent.iterdir(), key=lambda file: file.stat().st_mtime)
        for file in files[:-_MAX_FILES]:
            file.unlink(missing_ok=True)


@cache
def _source_digest() -> bytes:
    """Return a digest of all code that reads tokenizers, with the patterns of ``lm.text``."""
    digest = hashlib.sha256()
    room = Path(__file__).parent
    for source in sorted([*room.rglob("*.py"), *room.with_name("text").rglob("*.py")]):
        digest.update(source.read_bytes())
    return digest.digest()


def _directory() -> Path:
    return cache_directory() / "tokenizers"
