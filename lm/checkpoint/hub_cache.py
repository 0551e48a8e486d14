"""Models of the Hugging Face hub that were downloaded before, found by name in the cache of its tools.

The cache has a folder ``models--ORG--NAME`` for each model: ``refs/REVISION`` holds the commit of a branch or a tag,
``snapshots/COMMIT`` the files. Nothing is downloaded here. Source: huggingface_hub's guide "Understand caching".
"""

import os
import re
from pathlib import Path
from typing import NamedTuple

from lm.common.errors import UserError


class HubName(NamedTuple):
    """The name of a model on the Hugging Face hub: ``ORG/NAME``, or ``ORG/NAME@REVISION``."""

    repository: str
    revision: str
    """A branch, a tag or a commit; empty for ``main``."""

    @property
    def download_command(self) -> str:
        """The command that downloads the model into the cache."""
        return f"hf download {self.repository}" + (f" --revision {self.revision}" if self.revision else "")


def parse_hub_name(name: str) -> HubName | None:
    """Return the parts of a name; None if it cannot be that of a model on the hub."""
    match = re.fullmatch(r"([\w-][\w.-]*/\w[\w.-]*)(?:@(\w[\w.-]*(?:/\w[\w.-]*)*))?", name, re.ASCII)
    return HubName(match[1], match[2] or "") if match else None


def hub_cache_directory() -> Path:
    """Return the folder of the cache, from the environment variables of huggingface_hub."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{cache}/huggingface"
    hub = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
    return Path(os.path.expandvars(hub)).expanduser()


def find_in_hub_cache(name: HubName) -> Path | None:
    """Return the folder of the model's files; None if the model is not in the cache.

    Raises UserError if the cache has other revisions of the model only, or cannot be read.
    """
    folder = Path(f"models--{name.repository.replace('/', '--')}")
    try:
        folder = hub_cache_directory() / folder
        if (folder / "snapshots" / name.revision / "config.json").is_file():  # a commit
            return folder / "snapshots" / name.revision
        reference = folder / "refs" / (name.revision or "main")
        commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else ""
        if re.fullmatch(r"[\w-]+", commit, re.ASCII) and (snapshot := folder / "snapshots" / commit).is_dir():
            return snapshot
        commits = sorted(path.name for path in (folder / "snapshots").glob("*") if path.is_dir())
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: the home directory of an unknown user
        problem = str(error).rstrip(".")
        raise UserError(f"The cache of the hub cannot be read: {problem}. Check {folder} and HF_HOME.") from None
    if not commits:
        return None
    wanted = name.revision or "main"
    raise UserError(
        f"The cache of the hub has no revision {wanted} of {name.repository}, but {', '.join(commits)}. Run "
        f"{name.download_command} first, or name {name.repository}@{commits[0]}."
    )
