"""The root directory of all stages: small JSON files and attempt directories on any fsspec file system.

``lm`` reads and writes local files only. On a local root it works in place. For any other root, a finished attempt is
uploaded, and files are downloaded before they are read.
"""

import functools
import hashlib
import os
import posixpath
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fsspec.implementations.local import LocalFileSystem

from lm.common.errors import StorageError, UserError
from lm.files.atomic_dir import sync_path
from lm.files.cache_dir import cache_directory
from lm.files.checksum import dumps_with_checksum, file_checksum
from lm.files.retry import NOT_FOUND_ERRORS, is_range_past_end, retry_request, translate_errors
from lm.files.urls import open_filesystem, remote_version
from lm.hardware.cpu import available_cpus
from tasks.runtime.verified_files import open_verified_files

LOCK_FILE = ".lock"  # in the root while it is used, and beside the attempts of an output while it is made
LEASES = "leases"  # directory of the leases of runs, see tasks.runtime.locks
_MAX_CONCURRENT_REQUESTS = 16

_CLOCK_TICK_NS = 20_000_000  # file times are coarser than the clock: two changes in one tick have the same time

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class FileStat(NamedTuple):
    """Metadata of a file."""

    size: int
    fingerprint: str
    """Changes whenever the file changes. Empty if the file system cannot tell."""
    etag: str = ""


class Store:
    """The files below one root. Paths are given in parts, relative to the root.

    A file is trusted while its fingerprint is the same as when its digest was last checked on this machine. With
    ``is_full``, checks of earlier runs do not count: each file that is used is read once.
    """

    def __init__(self, root: str, is_full: bool = False) -> None:
        self.fs, self.base = open_filesystem(root)
        self.is_local = isinstance(self.fs, LocalFileSystem)
        self.verified = open_verified_files(f"{self.fs.protocol}:{self.base}", is_read=not is_full)
        self._is_full = is_full

    def _request(self, operation: Callable[[], _Result]) -> _Result:
        """Call the file system; retry if the network fails. Raises UserError for any error but a missing file."""
        attempt = functools.partial(translate_errors, f"The root {self.base}", operation, self.is_local)
        return attempt() if self.is_local else retry_request(attempt)

    def map(
        self, function: Callable[[_Item], _Result], items: Sequence[_Item], local_threads: int = 1
    ) -> list[_Result]:
        """Call a function for each item: on a remote root in several threads, as a call waits for its requests."""
        threads = min(len(items), local_threads if self.is_local else _MAX_CONCURRENT_REQUESTS)
        if threads <= 1:
            return [function(item) for item in items]
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(function, items))

    def path(self, *parts: str) -> str:
        """Return the full path of ``parts`` in the file system. Raises UserError if it leaves the root or contains a
        link: a root may come from an untrusted place, and no stage makes links."""
        path = self.base
        for name in "/".join(parts).split("/") if parts else ():
            if name in ("", ".", "..") or "\0" in name:
                raise UserError(f"{'/'.join(parts)!r} is not a path below {self.base}.")
            path = posixpath.join(path, name)
            if self.is_local and not _is_plain(path):
                raise UserError(f"{path} is a link or a special file; these are not read below a root. Remove it.")
        return path

    def url(self, *parts: str) -> str:
        """Return the full path of ``parts`` for display: a plain path, or a URL with its protocol."""
        return self.path(*parts) if self.is_local else str(self.fs.unstrip_protocol(self.path(*parts)))

    def read_bytes(self, *parts: str) -> bytes | None:
        """Return the content of a file, or None if it is missing."""
        path = self.path(*parts)
        options = {"max_concurrency": 1} if "s3" in self.fs.protocol else {}  # otherwise s3fs asks for the size first
        try:
            return bytes(self._request(lambda: self.fs.cat_file(path, **options)))
        except NOT_FOUND_ERRORS:
            return None

    def read_range(self, start: int, end: int, *parts: str) -> bytes:
        """Return the bytes ``start`` to ``end`` of a file, or fewer at its end. Raises UserError if it is missing."""
        path = self.path(*parts)

        def read() -> bytes:
            try:
                return bytes(self.fs.cat_file(path, start=start, end=end))
            except OSError as error:
                if is_range_past_end(error):  # a local file has no error then
                    return b""
                raise

        try:
            return self._request(read)
        except NOT_FOUND_ERRORS:
            raise UserError(f"{path} is missing. Run the pipeline again: it makes it again.") from None

    def write_json(self, content: dict[str, Any], *parts: str) -> None:
        """Write JSON with its checksum, atomically. Read it with :func:`tasks.runtime.schemas.read_record`."""
        self.write_text(dumps_with_checksum(content), *parts)

    def write_text(self, content: str, *parts: str) -> None:
        """Write a text file atomically. Raises StorageError if the root is not writable."""
        data, path = content.encode(), self.path(*parts)
        if self.is_local:
            _write_local(path, data)
        else:
            self._request(lambda: self.fs.pipe_file(path, data))  # object stores write atomically

    def create_file(self, data: bytes, *parts: str) -> bool:
        """Write a file unless it exists; else return False. A store without conditional writes replaces it."""
        path = self.path(*parts)
        if self.is_local:
            return _write_local(path, data, is_new=True)
        try:
            self._request(lambda: self.fs.pipe_file(path, data, mode="create"))
        except FileExistsError:
            return False
        return True

    def delete_file(self, *parts: str) -> None:
        """Delete a file if it exists."""
        with suppress(*NOT_FOUND_ERRORS):
            self._request(lambda: self.fs.rm_file(self.path(*parts)))

    def list_names(self, *parts: str) -> list[str]:
        """Return the names in a directory, sorted; empty if it is missing."""
        try:
            paths = self._request(lambda: self.fs.ls(self.path(*parts), False))
        except NOT_FOUND_ERRORS:
            return []
        return sorted(posixpath.basename(str(path).rstrip("/")) for path in paths)

    def list_files(self) -> dict[str, int]:
        """Return the size of each file below the root by its path, and 0 for each empty directory. Links are listed,
        not followed. Raises UserError if there is no root, or a directory cannot be read."""
        self.require_root()
        if self.is_local:
            sizes = self._request(lambda: _local_sizes(self.base))
        else:
            infos = self._request(lambda: self.fs.find(self.base, detail=True))
            sizes = {path: int(info["size"]) for path, info in infos.items()}
        return {posixpath.relpath(path, self.base): size for path, size in sizes.items()}

    def require_root(self) -> None:
        """Raise UserError if there is no root."""
        if not self._request(lambda: self.fs.isdir(self.base)):
            raise UserError(f"There is no root at {self.base}.")

    def local_directory(self, *parts: str) -> Path:
        """Return the directory to make files in: in place on a local root, otherwise an upload directory."""
        if self.is_local:
            return Path(self.path(*parts))
        return Path(cache_directory() / "uploads" / _sha256(self.base.encode()), *parts)

    def create_attempt_directory(self, *parts: str) -> Path:
        """Create a local directory for the files of a new attempt."""
        directory = self.local_directory(*parts)
        try:
            directory.mkdir(parents=True)
        except OSError as error:
            raise StorageError(f"{directory} cannot be written: {error.strerror or error}.") from None
        return directory

    def attempt_directories(self, *parts: str, newer_than: str = "") -> list[Path]:
        """Return the directories of earlier attempts on this machine, newest first, without those that hold a link.

        Their names begin with their start: ``newer_than`` leaves out the attempt of this name and older ones.
        """
        parent = self.local_directory(*parts)
        paths = parent.iterdir() if parent.is_dir() else ()
        directories = [path for path in paths if path.name > newer_than and path.is_dir()]
        return sorted((path for path in directories if all(map(_is_plain, (path, *path.rglob("*"))))), reverse=True)

    def remove_old_uploads(self) -> None:
        """Delete the files of failed uploads that are older than 30 days. Until then a training can resume."""
        for attempt in () if self.is_local else self.local_directory().glob("*/*/*"):
            with suppress(OSError):
                if attempt.is_dir() and time.time() - attempt.stat().st_mtime > 30 * 24 * 3600:
                    shutil.rmtree(attempt)

    def publish(self, directory: Path, files: list[dict[str, Any]], *parts: str) -> dict[str, str]:
        """Write the files of an attempt to the store durably, and trust them, as they were just hashed.

        ``files`` are as :func:`describe_files` returns them. Returns the ETag of each file, if the store has ETags. The
        directory of an uploaded attempt is deleted.
        """
        if self.is_local:
            for path in (directory, *directory.rglob("*")):
                sync_path(path)
        for file in () if self.is_local else files:
            source, target = str(directory / file["path"]), self.path(*parts, file["path"])
            self._request(functools.partial(self.fs.put_file, source, target))
        stats = self._stat_files(parts, [file["path"] for file in files])
        self._trust(parts, files, stats)
        if not self.is_local:
            shutil.rmtree(directory)
        return {name: file_stat.etag for name, file_stat in stats.items() if file_stat.etag}

    def find_damaged(
        self, files: Iterable[Mapping[str, Any]], *parts: str, etags: Mapping[str, str] | None = None
    ) -> list[str]:
        """Return the paths of the files below ``parts`` that are missing or changed.

        Each file has ``path``, ``bytes`` and ``sha256``. A file is read only if it is not trusted, and its ETag is not
        the one in ``etags``.
        """
        files = list(files)
        stats = self._stat_files(parts, [file["path"] for file in files])

        def is_damaged(file: Mapping[str, Any]) -> bool:
            file_stat = stats.get(file["path"])
            if not file_stat or file_stat.size != file["bytes"]:
                return True
            is_same_etag = file_stat.etag and file_stat.etag == (etags or {}).get(file["path"]) and not self._is_full
            verified_digest = self.verified.digest("/".join((*parts, file["path"])), file_stat.fingerprint)
            return not is_same_etag and verified_digest != file["sha256"] and bool(self.describe_damage(file, *parts))

        are_damaged = self.map(is_damaged, files, available_cpus())  # hashing releases the GIL
        self._trust(parts, [file for file, is_bad in zip(files, are_damaged, strict=True) if not is_bad], stats)
        return [file["path"] for file, is_bad in zip(files, are_damaged, strict=True) if is_bad]

    def describe_damage(self, file: Mapping[str, Any], *parts: str) -> str:
        """Read a file, and return how it differs from its size and digest; empty if it does not."""
        path = self.path(*parts, file["path"])
        try:
            size = int(self._request(lambda: self.fs.info(path))["size"])
            if size != file["bytes"]:
                return f"it has {size:,} bytes instead of {file['bytes']:,}"
            digest = self._request(lambda: file_checksum(self.fs.open(path)))
            return "" if digest == file["sha256"] else "its content has changed"
        except NOT_FOUND_ERRORS:
            return "it is missing"

    def _trust(self, parts: tuple[str, ...], files: Iterable[Mapping[str, Any]], stats: dict[str, FileStat]) -> None:
        """Remember that the files have their digests."""
        self.verified.add(
            ("/".join((*parts, file["path"])), stats[file["path"]].fingerprint, file["sha256"])
            for file in files
            if file["path"] in stats
        )

    def fingerprint(self, *parts: str) -> str | None:
        """Return a string that changes whenever a file below a directory changes. It is empty if that cannot be told,
        and None if there is no file."""
        fingerprints = sorted((name, file_stat.fingerprint) for name, file_stat in self._stat_files(parts).items())
        is_known = all(fingerprint for _, fingerprint in fingerprints)
        return (_sha256(repr(fingerprints).encode()) if is_known else "") if fingerprints else None

    def _stat_files(self, parts: tuple[str, ...], names: list[str] | None = None) -> dict[str, FileStat]:
        """Return the metadata of the files ``names`` below ``parts``, by default of all files, without missing ones."""
        stats: dict[str, FileStat] = {}
        base = self.path(*parts)
        if self.is_local:
            if names is None:
                found = (os.path.join(directory, name) for directory, _, files in os.walk(base) for name in files)
                paths = {os.path.relpath(path, base): path for path in found}
                # An unfinished attempt may have a link, which belongs to no output and is not followed.
                stats = {name: FileStat(0, "") for name, path in paths.items() if not _is_plain(path)}
                names = [name for name in paths if name not in stats]
            for name in names:
                with suppress(*NOT_FOUND_ERRORS):
                    info = self._request(Path(self.path(*parts, name)).stat)
                    fingerprint = f"{info.st_size}-{info.st_mtime_ns}-{info.st_ctime_ns}-{info.st_ino}"
                    is_settled = info.st_ctime_ns < time.time_ns() - _CLOCK_TICK_NS
                    stats[name] = FileStat(info.st_size, fingerprint if is_settled else "")
            return stats
        with suppress(*NOT_FOUND_ERRORS):
            for path, info in self._request(lambda: self.fs.find(base, detail=True)).items():  # one listing for all
                name, size = posixpath.relpath(path, base), int(info["size"])
                version, etag = remote_version(info)
                if names is None or name in names:
                    stats[name] = FileStat(size, version and f"{size}-{version}", etag)
        return stats

    @functools.cached_property
    def copies(self) -> "Store":
        """The local copies of files of a remote root; a local root itself."""
        if self.is_local:
            return self
        return Store(str(cache_directory() / "downloads" / _sha256(self.base.encode())), self._is_full)

    def download(self, target: Path, *parts: str) -> None:
        """Write the content of a file to a local path atomically; do nothing if the file is missing."""
        temporary = target.with_name(f"{target.name}.{uuid.uuid4().hex}.tmp")
        try:
            self._request(lambda: self.fs.get_file(self.path(*parts), str(temporary)))
            temporary.replace(target)
        except NOT_FOUND_ERRORS:
            target.unlink(missing_ok=True)
        finally:
            temporary.unlink(missing_ok=True)

    def remove(self, *parts: str) -> None:
        """Delete a file or directory, and on a local root the parent directories that become empty."""
        if not self.is_local:
            with suppress(*NOT_FOUND_ERRORS):
                self._request(lambda: self.fs.rm(self.path(*parts), recursive=True))
            return
        path = Path(self.path(*parts))
        try:
            if path.is_dir():
                shutil.rmtree(path)  # follows no links
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"{path} cannot be deleted: {error.strerror or error}.") from None
        with suppress(OSError):  # the parent is not empty
            for _ in path.relative_to(self.base).parts[1:]:
                path = path.parent
                path.rmdir()


def describe_files(directory: Path) -> list[dict[str, Any]]:
    """Return the relative path, size and sha256 of each file below ``directory``, in the order of their paths."""
    return [
        {
            "path": path.relative_to(directory).as_posix(),
            "bytes": path.stat().st_size,
            "sha256": file_checksum(path.open("rb")),
        }
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    ]


def _local_sizes(base: str) -> dict[str, int]:
    """Return what :meth:`Store.list_files` does, by full path. fsspec omits directories that cannot be read."""

    def fail(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # another process may delete directories
            raise error

    sizes: dict[str, int] = {}
    for directory, folders, files in os.walk(base, onerror=fail):
        if not folders and not files and directory != base:
            sizes[directory] = 0
        for path in (Path(directory, name) for name in (*files, *folders)):
            with suppress(FileNotFoundError):
                info = path.lstat()
                if not stat.S_ISDIR(info.st_mode):  # also a link to a directory
                    sizes[str(path)] = info.st_size
    return sizes


def _write_local(path: str, data: bytes, is_new: bool = False) -> bool:
    """Write a file atomically. Return False if it exists and must be new. Raises StorageError."""
    temporary = f"{path}.{uuid.uuid4().hex}.tmp"
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        try:
            Path(temporary).write_bytes(data)
            sync_path(temporary)
            try:
                (os.link if is_new else os.replace)(temporary, path)
            except FileExistsError:
                return False
        finally:
            Path(temporary).unlink(missing_ok=True)
        sync_path(os.path.dirname(path))
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror or error}.") from None
    return True


def _is_plain(path: str | Path) -> bool:
    """Return whether the path is missing, a regular file or a directory: not a link, pipe or device."""
    try:
        mode = os.lstat(path).st_mode
    except (OSError, ValueError):
        return True  # the operation that follows raises
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
