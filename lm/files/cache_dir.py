"""The project's directory in the user's cache."""

import os
from pathlib import Path

from lm.common.errors import UserError


def cache_directory() -> Path:
    """Return ``$XDG_CACHE_HOME/textmill``, by default ``~/.cache/textmill``. Raises UserError without a home."""
    if cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(cache) / "textmill"
    try:
        return Path.home() / ".cache" / "textmill"
    except RuntimeError:  # as of a container's user that /etc/passwd does not list
        raise UserError("This user has no home directory; set HOME or XDG_CACHE_HOME to a writable one.") from None
