"""The root directory of all stages: small JSON files and attempt directories on any fsspec file system.

``lm`` reads and writes local files only. On a local root it works in place; for another root a finished attempt is
uploaded, and files are fetched before they are read.
"""

import functools
import hashlib
import logging
import os
import posixpath
import shutil
import stat
import tempfile
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from fsspec.implementations.local import LocalFileSystem
from tenacity import (
    Retrying,
    retry_if_exception_type,
    stop_after_attempt,
    stop_after_delay,
    wait_exponential,
    wait_random,
)

from lm.corpus import connect, is_network_failure
from lm.errors import Unreachable, UserError
from lm.signed import sign
from tasks.machine import cache_directory

log = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")
_MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
patiently = Retrying(
    retry=retry_if_exception_type(Unreachable),
    stop=stop_after_attempt(4) | stop_after_delay(60),  # an attempt may have waited for long
    wait=wait_exponential(multiplier=2) + wait_random(0, 1),  # 2, 4 and 8 seconds, and a little more
    before_sleep=lambda state: log.warning("%s Trying again.", state.outcome and state.outcome.exception()),
    reraise=True,
)
_downloading = threading.Lock()
_verified: set[tuple[str, int, str, str]] = set()  # files whose digest this process has checked, as they were then


class Store:
    """Files under one root. Paths are relative to it, with ``/`` between their parts."""

    def __init__(self, root: str) -> None:
        try:
            self.fs, self.base = connect(root)
        except (ValueError, ImportError) as error:
            raise UserError(f"The root {root} cannot be used: {error}") from None
        self.is_local = isinstance(self.fs, LocalFileSystem)

    def _ask(self, operation: Callable[[], _Answer]) -> _Answer:
        """Do something in the file system: again where a network failed, and raising UserError for all but a missing
        file."""
        return self._try(operation) if self.is_local else patiently(self._try, operation)

    def _try(self, operation: Callable[[], _Answer]) -> _Answer:
        try:
            return operation()
        except _MISSING:
            raise
        except Exception as error:  # file systems have errors of their own
            may_pass = isinstance(error, OSError) and not isinstance(error, PermissionError) and not self.is_local
            if may_pass or is_network_failure(error):
                raise Unreachable(f"The root {self.base} cannot be reached: {error}") from error
            raise UserError(f"The root {self.base} cannot be used: {error}") from error

    def path(self, *parts: str) -> str:
        """The full path of ``parts`` in the file system; raises UserError where it leads out of the root, by its own
        words or by a link: a root may come from elsewhere, and no stage makes links."""
        place = self.base
        for name in "/".join(parts).split("/") if parts else ():
            if name in ("", ".", "..") or "\0" in name:
                raise UserError(f"{self.base} has no {'/'.join(parts)!r}: that path leads out of it.")
            place = posixpath.join(place, name)
            if self.is_local and not _is_plain(place):
                raise UserError(f"{place} is a link, or no plain file: none is followed below a root. Remove it.")
        return place

    def url(self, *parts: str) -> str:
        """The full path of ``parts`` for a person: a plain path, or a URL with its protocol."""
        return self.path(*parts) if self.is_local else str(self.fs.unstrip_protocol(self.path(*parts)))

    def read_bytes(self, *parts: str) -> bytes | None:
        """The content of a file; None where it is missing."""
        path = self.path(*parts)
        options = {"max_concurrency": 1} if "s3" in self.fs.protocol else {}  # else s3fs asks for the size first
        try:
            return bytes(self._ask(lambda: self.fs.cat_file(path, **options)))
        except _MISSING:
            return None

    def write_json(self, content: dict[str, Any], *parts: str) -> None:
        """Write a JSON file that carries its own digest, atomically; :func:`tasks.records.read` reads it."""
        self.write_text(sign(content), *parts)

    def write_text(self, content: str, *parts: str) -> None:
        """Write a text file atomically; raises UserError where the root cannot be written."""
        data, path = content.encode(), self.path(*parts)
        try:
            if not self.is_local:
                self._ask(lambda: self.fs.pipe_file(path, data))  # object stores show a whole object or none
                return
            os.makedirs(os.path.dirname(path), exist_ok=True)
            temporary = f"{path}.{uuid.uuid4().hex}.tmp"
            Path(temporary).write_bytes(data)
            _sync(temporary)
            os.replace(temporary, path)
            _sync(os.path.dirname(path))
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror or error}.") from None

    def names(self, *parts: str) -> list[str]:
        """Names of the entries of a directory, sorted; empty where it is missing."""
        try:
            found = self._ask(lambda: self.fs.ls(self.path(*parts), False))
        except _MISSING:
            return []
        return sorted(posixpath.basename(str(path).rstrip("/")) for path in found)

    def _local_place(self, *parts: str) -> Path:
        """Where files are made: in place on a local root; for another, where a later run on this machine finds them."""
        if self.is_local:
            return Path(self.path(*parts))
        return Path(cache_directory() / "uploads" / _sha256(self.base.encode()), *parts)

    def workplace(self, *parts: str) -> Path:
        """A local directory for the files of a new attempt: the place itself, or one to upload from."""
        directory = self._local_place(*parts)
        try:
            directory.mkdir(parents=True)
        except OSError as error:
            raise UserError(f"{directory} cannot be written: {error.strerror or error}.") from None
        return directory

    def workplaces(self, *parts: str) -> list[Path]:
        """Directories of earlier attempts that are still on this machine, the newest first; none that holds a link."""
        place = self._local_place(*parts)
        found = [path for path in place.iterdir() if path.is_dir()] if place.is_dir() else []
        return sorted((path for path in found if all(map(_is_plain, (path, *path.rglob("*"))))), reverse=True)

    def publish(self, directory: Path, *parts: str) -> None:
        """Make the files of a workplace durable at their place; one to upload from is removed."""
        for path in (directory, *sorted(directory.rglob("*"))):
            if self.is_local:
                _sync(path)
            elif path.is_file():
                target = self.path(*parts, path.relative_to(directory).as_posix())
                self._ask(functools.partial(self.fs.put_file, str(path), target))
        if not self.is_local:
            shutil.rmtree(directory)

    def is_intact(self, size: int, sha256: str, *parts: str) -> bool:
        """Whether a file is there with this size and digest; read at most once a process while it does not change."""
        path = self.path(*parts)
        try:
            info = self._ask(lambda: self.fs.info(path))
        except _MISSING:
            return False
        mark = info.get("ETag") or info.get("mtime") or info.get("LastModified") or info.get("created")
        seen = (path, size, str(mark), sha256)
        if not (mark and seen in _verified):
            if self.fault(size, sha256, *parts):
                return False
            _verified.add(seen)
        return True

    def fault(self, size: int, sha256: str, *parts: str) -> str:
        """What is wrong with a file that should have this size and digest, read whole; empty where it is as it was."""
        path = self.path(*parts)
        try:
            found = int(self._ask(lambda: self.fs.info(path))["size"])
            if found != size:
                return f"it has {found:,} bytes instead of {size:,}"
            return "" if self._ask(lambda: _digest(self.fs.open(path))) == sha256 else "its content has changed"
        except _MISSING:
            return "it is missing"

    def local(self, size: int, sha256: str, *parts: str) -> Path:
        """A local copy of a file of this size and digest, or the file itself on a local root; raises UserError where it
        is damaged. The files of a directory stay together."""
        damaged = f"{self.path(*parts)} is damaged or missing; run the pipeline again, which makes it anew."
        if self.is_local:
            if not self.is_intact(size, sha256, *parts):
                raise UserError(damaged)
            return Path(self.path(*parts))
        with _downloading:  # chunks at once want the same tokenizer
            copy = Path(_downloads().name, _sha256(self.base.encode()), *parts)
            if not copy.exists():
                copy.parent.mkdir(parents=True, exist_ok=True)
                temporary = copy.with_name(f"{uuid.uuid4().hex}.tmp")
                try:
                    self._ask(lambda: self.fs.get_file(self.path(*parts), str(temporary)))
                except _MISSING:
                    raise UserError(damaged) from None
                if _digest(temporary.open("rb")) != sha256:
                    raise UserError(damaged)
                temporary.replace(copy)
        return copy

    def files(self) -> dict[str, int]:
        """The size of every file below the root by its path, links not followed, and of every empty directory (0).
        Raises UserError where there is no root."""
        if not self._ask(lambda: self.fs.isdir(self.base)):
            raise UserError(f"There is no root at {self.base}.")
        if not self.is_local:
            found = self._ask(lambda: self.fs.find(self.base, detail=True))
            return {posixpath.relpath(path, self.base): int(info["size"]) for path, info in found.items()}
        sizes = {}
        for place, directories, names in os.walk(self.base):
            links = [name for name in directories if not _is_plain(os.path.join(place, name))]
            for path in [Path(place, name) for name in (*names, *links)] or [Path(place)] * (not directories):
                with suppress(FileNotFoundError):  # of a run that goes on
                    sizes[path.relative_to(self.base).as_posix()] = 0 if path.is_dir() else path.lstat().st_size
        return sizes

    def remove(self, *parts: str) -> None:
        """Delete a file or a directory of a local root, and the directories around it that are empty then."""
        path = Path(self.path(*parts))
        try:
            if path.is_dir():
                shutil.rmtree(path)  # which follows no link
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"{path} cannot be deleted: {error.strerror or error}.") from None
        with suppress(OSError):  # which is not empty
            for _ in path.relative_to(self.base).parts[1:]:
                path = path.parent
                path.rmdir()


def describe_files(directory: Path) -> list[dict[str, Any]]:
    """Path (relative), size and sha256 of every file below ``directory``, in the order of their paths."""
    return [
        {
            "path": path.relative_to(directory).as_posix(),
            "bytes": path.stat().st_size,
            "sha256": _digest(path.open("rb")),
        }
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    ]


def _is_plain(path: str | Path) -> bool:
    """Whether nothing or a file or directory is there: no link, and nothing that would never end."""
    try:
        mode = os.lstat(path).st_mode
    except (OSError, ValueError):
        return True  # using it will tell
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _digest(file: Any) -> str:
    with file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: str | Path) -> None:
    """Make a file, or the names in a directory, outlive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@functools.cache
def _downloads() -> tempfile.TemporaryDirectory[str]:
    """Gone when the process ends."""
    return tempfile.TemporaryDirectory(prefix="textmill-downloads-")
