"""Tokenizers as arrays, in files of the user's cache: reading the text files of a vocabulary takes ten times as long.

The name of a file is a digest of all that makes the tokenizer, code included, so it is never out of date.
"""

import hashlib
import json
import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from lm.files.cache_dir import cache_directory
from lm.kernels.jit import Bytes, Int32s, Int64s
from lm.tokenizer.merges import find_reachable_merges

_MAX_FILES = 32  # 1 MB for GPT-2's tokenizer; the least recently used are removed
_DIGEST_BYTES = 32


class TokenizerArrays(NamedTuple):
    """The tokens, the merges and the options of a tokenizer."""

    data: Bytes  # the bytes of all tokens
    ends: Int64s  # (tokens + 1,): where they end in ``data``, from 0
    ids: Int32s  # (tokens,)
    byte_ids: Int32s  # (256,): ids of the bytes
    merges: Int32s  # (merges, 3): ids of the left, the right and the merged token
    reachable: Int32s  # the ranks of the merges that can happen
    is_whole: Bytes  # (tokens,): 1 if a pretoken with these bytes is this token, whatever the merges
    options: dict[str, Any]  # JSON; see lm.tokenizer.formats.tokenizer_config

    def vocab(self) -> dict[int, bytes]:
        """Return the tokens by id."""
        data, ends = self.data.tobytes(), self.ends.tolist()
        tokens = (data[start:end] for start, end in zip(ends, ends[1:], strict=False))
        return dict(zip(self.ids.tolist(), tokens, strict=True))

    def merge_pairs(self) -> list[tuple[bytes, bytes]]:
        """Return the parts of the merges, in their order."""
        vocab = self.vocab()
        return [(vocab[left], vocab[right]) for left, right in self.merges[:, :2].tolist()]


def make_arrays(
    vocab: dict[int, bytes], ids: dict[bytes, int], merges: Sequence[tuple[bytes, bytes]], added: Collection[int] | None
) -> TokenizerArrays:
    """Return the arrays, without options, of tokens by id, ids by bytes and merges.

    ``added``: the ids of added tokens; all other tokens stay whole as pretokens. None: only merges make tokens. Raises
    KeyError, with the token, if ``ids`` lacks one of the bytes or of the merges.
    """
    byte_ids = [ids[bytes([byte])] for byte in range(256)]
    parts = chain.from_iterable((left, right, left + right) for left, right in merges)
    rows = np.fromiter(map(ids.__getitem__, parts), np.int32, 3 * len(merges)).reshape(-1, 3)
    if added is None:
        is_whole = np.zeros(len(vocab), np.uint8)
    else:
        whole = (token and ids[token] == token_id and token_id not in added for token_id, token in vocab.items())
        is_whole = np.fromiter(map(bool, whole), np.uint8, len(vocab))
    return TokenizerArrays(
        np.frombuffer(b"".join(vocab.values()), np.uint8),
        np.cumsum([0, *map(len, vocab.values())]),
        np.array(list(vocab), np.int32),
        np.array(byte_ids, np.int32),
        rows,
        find_reachable_merges(merges),
        is_whole,
        {},
    )


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
