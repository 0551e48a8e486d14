"""Decorators that compile numba kernels and their helpers once per machine; the arrays and statuses of kernels."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from lm.kernels.disk_cache import CACHE_DIR, IS_CACHE_WRITABLE, KernelCache
from lm.kernels.linking import HelperCompiler
from lm.kernels.simd import BOUNDSCHECK

Bytes = npt.NDArray[np.uint8]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
UInt32s = npt.NDArray[np.uint32]
UInt64s = npt.NDArray[np.uint64]
Ids = npt.NDArray[np.unsignedinteger]  # uint16 or uint32
Floats = npt.NDArray[np.float32]
Stored = npt.NDArray[Any]  # of float32, int8, or bfloat16 as uint16: the upper half of a float32
Records = npt.NDArray[np.void]  # a structured array of one record
Record = Any  # its record
Word = np.uint64
Int = int | np.signedinteger[Any]

# Statuses that kernels return: 0 or negative, so that a kernel can return either a count or, below 0, a status. With a
# "full" status the kernel has stopped where it can continue after the caller has enlarged the structure.
OK = 0
WORKSPACE_FULL = -1  # a pretoken is longer than the workspace
TABLE_FULL = -2  # a hash table needs more slots
ARENA_FULL = -3  # the pretoken table needs a larger arena
PLACES_FULL = -4  # BPE training needs more room for the places of pairs
INVALID_UTF8 = -5  # INVALID_UTF8 - i: byte i of the buffer is not valid UTF-8

log = logging.getLogger(__name__)

# No numba runtime: reference counts of arrays at every call would cost more than the calls. So kernels create no
# arrays; the caller passes every array that they write.
_OPTIONS: dict[str, Any] = {
    "nogil": True,
    "boundscheck": BOUNDSCHECK,
    "error_model": "numpy",
    "_nrt": False,
    "no_rewrites": True,  # they change nothing in such code
    "no_cfunc_wrapper": True,
}

HELPER_OPTIONS: Any = {**_OPTIONS, "no_cpython_wrapper": True, "pipeline_class": HelperCompiler}

KERNELS: list[Any] = []  # numba dispatchers of all kernels defined so far


def kernel(function: Callable[..., Any], fastmath: bool | set[str] = False) -> Any:
    """Compile a function at its first call from Python, release the GIL in it, and cache the machine code on disk.

    Each kernel compiles its own copy of all helpers that it calls, so keep the number of kernels small.
    """
    dispatcher = numba.njit(forceinline=False, fastmath=fastmath, **_OPTIONS)(function)
    if IS_CACHE_WRITABLE:
        dispatcher._cache = KernelCache(function)  # as njit(cache=True) does with a FunctionCache
    KERNELS.append(dispatcher)
    return dispatcher


def helper(function: Callable[..., Any], forceinline: bool = False, fastmath: bool | set[str] = False) -> Any:
    """Compile a function that only kernels call; a call from Python raises ValueError."""
    return numba.njit(forceinline=forceinline, fastmath=fastmath, **HELPER_OPTIONS)(function)


inlined = partial(helper, forceinline=True)
# These may add floats in any order, and so with vector instructions.
fastmath_kernel = partial(kernel, fastmath={"reassoc", "contract", "nsz"})
fastmath_helper = partial(helper, fastmath={"reassoc", "contract", "nsz"})

_logged: set[str] = set()  # names of kernels that need no message in this process any more


@contextmanager
def log_compilation(name: str) -> Iterator[None]:
    """Log before and after the first call of the kernels called ``name``, if this machine has to compile them."""
    if name in _logged:
        yield
        return
    _logged.add(name)
    marker = CACHE_DIR / f"{name}.compiled"
    if marker.exists():
        yield
        return
    started = time.monotonic()
    frequency = "once" if IS_CACHE_WRITABLE else "at each start"
    log.warning("Compiling the %s kernels for this CPU, %s; this takes some seconds.", name, frequency)
    yield
    place = f"cached in {CACHE_DIR}" if IS_CACHE_WRITABLE else f"not cached, because {CACHE_DIR} is not writable"
    log.warning("Compiled the %s kernels in %.1f s; %s.", name, time.monotonic() - started, place)
    if IS_CACHE_WRITABLE:
        with suppress(OSError):  # a full disk or a removed directory: the next process logs again
            marker.touch()
