"""A cache of checked digests, so that an unchanged file is not read again.

The cache maps the path and fingerprint of a file to its digest. It is one SQLite file per root in the user's cache
directory. If it is lost, files are read again.
"""

import hashlib
import logging
import sqlite3
import threading
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from lm.files.cache_dir import cache_directory

log = logging.getLogger(__name__)

_MAX_ROWS = 200_000  # per root, about 60 MB; the oldest rows are deleted first
_BUSY_TIMEOUT_SECONDS = 5.0  # another process may be writing


class VerifiedFiles:
    """The checked digests of one root, in memory and in a file."""

    def __init__(self, path: Path, is_read: bool = True) -> None:
        """Open or create the SQLite file ``path``. Digests of earlier runs count only if ``is_read``."""
        self._digests: dict[str, tuple[str, str]] = {}
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        for _ in range(2):
            try:
                self._open(path, is_read)
                return
            except (sqlite3.Error, OSError) as error:
                log.debug("%s cannot be used: %s", path, error)
                if isinstance(error, (sqlite3.OperationalError, OSError)):  # it is busy, or the disk is full
                    return
            with suppress(OSError):  # a damaged file is replaced
                path.unlink(missing_ok=True)

    def _open(self, path: Path, is_read: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(path, _BUSY_TIMEOUT_SECONDS, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("CREATE TABLE IF NOT EXISTS digests (path TEXT PRIMARY KEY, fingerprint TEXT, sha256 TEXT)")
        with suppress(sqlite3.OperationalError):  # another process is writing
            # A replaced row gets a new rowid.
            connection.execute("DELETE FROM digests WHERE rowid <= (SELECT max(rowid) FROM digests) - ?", (_MAX_ROWS,))
        rows = connection.execute("SELECT path, fingerprint, sha256 FROM digests").fetchall()
        self._connection = connection
        if is_read:
            self._digests = {name: (fingerprint, digest) for name, fingerprint, digest in rows}

    def digest(self, path: str, fingerprint: str) -> str | None:
        """Return the digest of the file, if it was checked under this fingerprint."""
        known, digest = self._digests.get(path, ("", ""))
        return digest if fingerprint and known == fingerprint else None

    def add(self, rows: Iterable[tuple[str, str, str]]) -> None:
        """Remember checked files, each (path, fingerprint, sha256). Rows with an empty fingerprint are ignored."""
        new = [row for row in rows if row[1] and self._digests.get(row[0]) != row[1:]]
        if not new:
            return
        with self._lock:
            self._digests.update({path: (fingerprint, digest) for path, fingerprint, digest in new})
            if self._connection:
                try:
                    self._connection.execute("BEGIN")
                    self._connection.executemany("INSERT OR REPLACE INTO digests VALUES (?, ?, ?)", new)
                    self._connection.execute("COMMIT")
                except sqlite3.Error as error:
                    log.debug("Checked digests are kept in memory only: %s", error)
                    self._connection = None


def open_verified_files(root: str, is_read: bool) -> VerifiedFiles:
    """Open the checked digests of a root. Those of earlier runs count only if ``is_read``."""
    path = cache_directory() / "verified" / f"{hashlib.sha256(root.encode()).hexdigest()[:32]}.sqlite"
    return _open_shared(path) if is_read else VerifiedFiles(path, is_read=False)


_open_shared = lru_cache(maxsize=64)(VerifiedFiles)  # all stages of a process share the digests
