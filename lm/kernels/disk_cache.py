"""Machine code of the kernels on disk: the folder, and how numba writes to it.

Each kernel gets its own cache object. ``numba.config.CACHE_DIR`` is left alone, because it sets the folder of every
package in the process.
"""

import glob
import hashlib
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import llvmlite.binding
import numba
from filelock import FileLock, Timeout
from numba.core.caching import CompileResultCacheImpl, FunctionCache, UserProvidedCacheLocator

from lm.common.processes import import_environment
from lm.files.cache_dir import cache_directory, prune
from lm.kernels.simd import BOUNDSCHECK

log = logging.getLogger(__name__)

_LOCK_TIMEOUT_SECONDS = 120  # then the process that holds the lock counts as hung
_MAX_UNUSED_SECONDS = 30 * 24 * 3600  # after that the folder of other sources is removed


def _cache_dir() -> Path:
    """Return the folder for this CPU and a digest of all sources: numba does not see changed helpers in other files."""
    sources = Path(__file__).parent
    environment = f"{sys.version} {numba.__version__} {llvmlite.binding.get_host_cpu_name()} {sources} {BOUNDSCHECK}"
    digest = hashlib.sha256(environment.encode())
    for source in sorted(sources.rglob("*.py")):
        digest.update(source.read_bytes())
    return cache_directory() / "kernels" / digest.hexdigest()[:16]


def _open_cache_dir(folder: Path) -> bool:
    """Create the folder or update its modification time; return whether it is writable."""
    try:
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    with suppress(OSError):
        os.utime(folder)
    if is_new:
        folders = (path for path in folder.parent.iterdir() if re.fullmatch("[0-9a-f]{16}", path.name))
        prune((path for path in folders if not path.is_symlink()), _MAX_UNUSED_SECONDS)  # those of other sources
    return os.access(folder, os.W_OK)


CACHE_DIR = _cache_dir()
IS_CACHE_WRITABLE = _open_cache_dir(CACHE_DIR)  # False: each start compiles


class _Locator(UserProvidedCacheLocator):
    def __init__(self, function: Callable[..., Any], path: str) -> None:
        self._py_file, self._lineno, self._cache_path = path, function.__code__.co_firstlineno, str(CACHE_DIR)


class _CacheFiles(CompileResultCacheImpl):
    def __init__(self, function: Callable[..., Any]) -> None:
        self._lineno = function.__code__.co_firstlineno
        self._locator = _Locator(function, function.__code__.co_filename)
        self._filename_base = self.get_filename_base(f"{function.__module__}.{function.__qualname__}", "")


class KernelCache(FunctionCache):
    """Numba's cache of one function, in :data:`CACHE_DIR`, with a lock around compilation.

    One process compiles a function while others that need it wait. With numba's own cache each process would compile
    it, and two signatures could get the same file.
    """

    _impl_class = _CacheFiles

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        self._lock_path = CACHE_DIR / f"{function.__name__}.lock"
        self._lock: FileLock | None = None  # held by this process while it compiles

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the machine code for a signature; None, with the lock held, if this process has to compile it."""
        code = self._load(sig, target_context)
        if code is None and self._lock is None:
            CACHE_DIR.mkdir(parents=True, exist_ok=True)  # it may have been removed since the start
            # A new object: filelock refuses a lock that a forked process inherited.
            self._lock = FileLock(self._lock_path, timeout=_LOCK_TIMEOUT_SECONDS, thread_local=False)
            with suppress(Timeout):
                self._lock.acquire()
            code = self._load(sig, target_context)
            if code is not None:
                self._release()
        return code

    def _load(self, sig: Any, target_context: Any) -> Any:
        """Read the machine code. Delete files that a power failure left damaged: they are compiled again."""
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:  # of pickle, which reads the files
            log.warning("The cached kernel %s is damaged (%s) and is compiled again.", self._impl.filename_base, error)
            for path in CACHE_DIR.glob(f"{glob.escape(self._impl.filename_base)}.*"):
                path.unlink(missing_ok=True)
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Write the machine code of one signature to the cache. Then let other processes that wait for it continue."""
        try:
            super().save_overload(sig, data)
        except OSError as error:
            log.warning("The kernel %s is not cached: %s", self._impl.filename_base, error)
        finally:
            self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release(force=True)
            self._lock = None


def pipeline_marker(pattern: str, id_bits: int) -> Path:
    """Return the file that exists if all kernels of such a pipeline run are compiled."""
    return CACHE_DIR / f"pipeline-{pattern}-{id_bits}.compiled"


def compile_in_background(pattern: str, id_bits: int) -> "subprocess.Popen[bytes] | None":
    """Start a process that compiles the kernels of a pipeline run; return None if they are already compiled.

    ``pattern`` is the name of a pattern with a compiled scanner, ``id_bits`` 16 or 32.
    """
    if not IS_CACHE_WRITABLE or pipeline_marker(pattern, id_bits).exists():
        return None
    command = [sys.executable, "-m", "lm.compile_kernels", "--pattern", pattern, "--id-bits", str(id_bits)]
    null, environment = subprocess.DEVNULL, {**os.environ, **import_environment()}
    return subprocess.Popen(command, env=environment, stdin=null, stdout=null, stderr=null)
