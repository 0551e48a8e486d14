"""A disk without space."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def full_disk(free_bytes: int) -> Iterator[None]:
    """Limit the size of each file that this process writes, which simulates a full disk."""
    resource = pytest.importorskip("resource", reason="needs limits of the operating system")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
