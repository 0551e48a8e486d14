"""The compiled core: numba kernels for scanning, counting, merging and encoding, compiled once for each machine.

Importing this package comes before importing any kernel: it sets numba's cache to a folder named by the digest of
these sources and the processor, as numba itself does not see that a helper in another file has changed.
"""

import hashlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llvmlite.binding
import numba
import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Ids = npt.NDArray[np.unsignedinteger]  # uint16 or uint32
Word = np.uint64
Int = int | np.signedinteger[Any]

log = logging.getLogger(__name__)


def _cache_directory() -> Path:
    folder = Path(__file__).parent
    made_by = f"{sys.version} {numba.__version__} {llvmlite.binding.get_host_cpu_name()} {folder}"
    digest = hashlib.sha256(made_by.encode())
    for source in sorted(folder.glob("*.py")):
        digest.update(source.read_bytes())
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "textmill" / "kernels" / digest.hexdigest()[:16]


CACHE = _cache_directory()
try:
    CACHE.mkdir(parents=True, exist_ok=True)
    IS_KEPT = os.access(CACHE, os.W_OK)
except OSError:
    IS_KEPT = False  # on a machine where nothing can be written, each start compiles
_config: Any = numba.config
_config.CACHE_DIR = str(CACHE)

# Without numba's runtime: counting references to arrays at every call would cost more than the calls. So kernels make
# no arrays; they are handed all that they write to.
_OPTIONS: dict[str, Any] = {"nogil": True, "boundscheck": False, "error_model": "numpy", "_nrt": False}


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a function at its first call, without the interpreter's lock, and keep the machine code on disk."""
    return numba.njit(cache=IS_KEPT, forceinline=False, **_OPTIONS)(function)


def summing(function: Callable[..., Any]) -> Any:
    """A kernel that may add up floats in any order, and so by vectors."""
    return numba.njit(cache=IS_KEPT, fastmath={"reassoc", "contract", "nsz"}, **_OPTIONS)(function)


def inlined(function: Callable[..., Any]) -> Any:
    """A small function that becomes part of the kernels that call it."""
    return numba.njit(forceinline=True, **_OPTIONS)(function)


_known: set[str] = set()  # what this process has said about compiling, or need not say


@contextmanager
def compiling(what: str) -> Iterator[None]:
    """Around the call of the kernels of one subject: where this machine has not compiled them yet, say so first, and
    then how long it took."""
    if what in _known:
        yield
        return
    _known.add(what)
    mark = CACHE / f"{what}.compiled"
    is_new = not mark.exists()
    started = time.monotonic()
    if is_new:
        often = "once" if IS_KEPT else "at each start"
        log.warning("Compiling the %s kernels for this processor, %s; this takes some seconds.", what, often)
    yield
    if is_new:
        kept = f"kept in {CACHE}" if IS_KEPT else f"not kept, as {CACHE} cannot be written"
        log.warning("Compiled the %s kernels in %.1f s; %s.", what, time.monotonic() - started, kept)
        if IS_KEPT:
            mark.touch()
