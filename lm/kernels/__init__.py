"""The compiled core: numba kernels for scanning, counting, merging and encoding, compiled once for each machine.

Importing this package comes before importing any kernel: it sets numba's cache to a folder named by the digest of
these sources and the processor, as numba itself does not see that a helper in another file has changed.
"""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite.binding
import numba


def _cache_directory() -> Path:
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.binding.get_host_cpu_name()}".encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "textmill" / "kernels" / digest.hexdigest()[:16]


CACHE = _cache_directory()
numba.config.CACHE_DIR = str(CACHE)

# Without numba's runtime: counting references to arrays at every call would cost more than the calls. So kernels make
# no arrays; they are handed all that they write to.
_OPTIONS: dict[str, Any] = {"nogil": True, "boundscheck": False, "error_model": "numpy", "_nrt": False}


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a function at its first call, without the interpreter's lock, and keep the machine code on disk."""
    return numba.njit(cache=True, **_OPTIONS)(function)


def inlined(function: Callable[..., Any]) -> Any:
    """A small function that becomes part of the kernels that call it."""
    return numba.njit(**_OPTIONS)(function)
