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
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import register_pass
from numba.core.typed_passes import NativeLowering

from lm.kernels.disk_cache import CACHE_DIR, IS_CACHE_WRITABLE, KernelCache
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
ONE, ALL_BITS = np.uint64(1), np.uint64(0xFFFFFFFFFFFFFFFF)

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


class _UnoptimizedLibrary(JITCodeLibrary):
    """Functions that are linked into other libraries and never run on their own."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True


@register_pass(mutates_CFG=True, analysis_only=False)
class _LowerToLibrary(NativeLowering):
    _name = "lower_to_library"

    def run_pass(self, state: Any) -> bool:
        state.flags.no_compile = True
        state.library = _UnoptimizedLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        super().run_pass(state)
        lowered = state["cr"]
        # Numba finds the function by its entry point, a different builtin for each function. A call from Python runs
        # the builtin: this one raises ValueError.
        entry_point = list[Any]().remove
        state.targetctx.insert_user_function(entry_point, lowered.fndesc, [state.library])
        state["cr"] = lowered._replace(cfunc=entry_point)
        return True


class _HelperCompiler(CompilerBase):
    """Compiles helpers to LLVM IR only, which is optimized once, as part of each kernel.

    Numba alone optimizes each function and emits its machine code, and does so again in every caller. That takes a
    fourth longer, and helpers whose loops are vectorized alone add floats in another order, so decode steps would round
    differently. Uses numba's hooks for custom compilers:
    https://numba.readthedocs.io/en/stable/developer/custom_pipeline.html
    """

    def define_pipelines(self) -> list[Any]:
        """Return the passes of numba's nopython mode with :class:`_LowerToLibrary` as the lowering."""
        passes = DefaultPassBuilder.define_nopython_pipeline(self.state, "helper")
        passes.passes = [
            (_LowerToLibrary, text) if step is NativeLowering else (step, text) for step, text in passes.passes
        ]
        passes.finalize()
        return [passes]


HELPER_OPTIONS: Any = {**_OPTIONS, "no_cpython_wrapper": True, "pipeline_class": _HelperCompiler}

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
