"""Local copies of files of a remote root, kept between runs in the user's cache.

A copy lies at the same place below ``downloads/<root>`` as the file below its root, so the files of a directory stay
together. It is checked as a file of a local root is: after a change it is downloaded again.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock

from lm.common.errors import StorageError, UserError
from tasks.runtime.store import Store


def local_path(store: Store, file: Mapping[str, Any], *parts: str) -> Path:
    """Return the path of an intact file: in place on a local root, else of a local copy.

    ``file`` has ``path``, ``bytes`` and ``sha256``. Raises UserError if it is damaged or missing.
    """
    copies = store.copies
    path = Path(copies.path(*parts, file["path"]))
    if not store.is_local:
        with suppress(OSError):
            os.utime(copies.path(*parts))  # remove_old_copies keeps it
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{path}.lock"):  # groups of chunks in other threads and processes use the same tokenizer
                if copies.find_damaged([file], *parts):
                    store.download(path, *parts, file["path"])
        except OSError as error:
            raise StorageError(f"The copy {path} cannot be written: {error.strerror or error}.") from None
    if copies.find_damaged([file], *parts):
        raise UserError(
            f"{store.path(*parts, file['path'])} is damaged or missing. Run the pipeline again: it makes it again."
        )
    return path
