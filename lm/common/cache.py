"""The project's directory in the user's cache."""

import os
from pathlib import Path


def cache_directory() -> Path:
    """Return ``$XDG_CACHE_HOME/textmill``, by default ``~/.cache/textmill``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "textmill"
