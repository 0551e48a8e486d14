"""Examples of removed text: those with the smallest hashes, so that the order of documents does not matter."""

import hashlib
from collections.abc import Iterable
from typing import Any, TypeVar

MAX_SAMPLES = 10
SAMPLE_CHARACTERS = 300

_Sample = TypeVar("_Sample", bound=tuple[Any, ...])


def sample_hash(text: bytes) -> str:
    """Return the hash of a text, the first field of a sample."""
    return hashlib.blake2b(text, digest_size=8).hexdigest()


def cut_sample(text: bytes) -> str:
    """Return the beginning of a text in UTF-8."""
    return text[: 8 * SAMPLE_CHARACTERS].decode("utf-8", "ignore")[:SAMPLE_CHARACTERS]


def choose_samples(samples: Iterable[_Sample]) -> list[_Sample]:
    """Return the samples with the smallest hashes, one of each hash, in their order."""
    return [*{sample[0]: sample for sample in sorted(samples)}.values()][:MAX_SAMPLES]
