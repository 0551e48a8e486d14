"""Copies of a training's checkpoints on an object store, so that the training can go on on another machine."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from lm.checkpoint.atomic_dir import atomic_directory
from lm.checkpoint.training_state import step_directories
from lm.common.periodic import run_periodically
from lm.text.sources import open_filesystem

log = logging.getLogger(__name__)

_POLL_SECONDS = 2.0
_LOGS = ("job.json", "metrics.jsonl", "samples.jsonl")
_DESCRIPTION = "checkpoint.json"  # copied last: without it there is no checkpoint


class CheckpointMirror:
    """Keeps the checkpoints of a local directory and of a URL the same."""

    def __init__(self, directory: Path, url: str) -> None:
        self.directory, self.url = directory, url
        self._fs, self._base = open_filesystem(url)
        self._uploaded: set[str] = set()

    def download(self) -> None:
        """Copy the checkpoints that are only at the URL, and the logs if there are none here."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for name in sorted(self._remote_checkpoints()):
            if not (self.directory / name).exists():
                with atomic_directory(self.directory / name) as temporary:
                    self._fs.get(f"{self._base}/{name}/", f"{temporary}/", recursive=True)
                log.info("Fetched the checkpoint %s from %s.", name, self.url)
            self._uploaded.add(name)
        for name in _LOGS:
            if not (self.directory / name).exists():
                with suppress(FileNotFoundError):
                    self._fs.get_file(f"{self._base}/{name}", str(self.directory / name))

    def upload(self) -> None:
        """Copy the checkpoints that are only here, with the logs, then delete at the URL those that are not here."""
        local = {path.name: path for path in step_directories(self.directory)}
        if new := [name for name in local if name not in self._uploaded]:
            for name in _LOGS:
                if (self.directory / name).exists():
                    self._fs.put_file(str(self.directory / name), f"{self._base}/{name}")
        for name in new:
            with suppress(FileNotFoundError):  # the training has deleted it meanwhile
                paths = sorted(local[name].iterdir(), key=lambda path: path.name == _DESCRIPTION)
                for path in paths:
                    self._fs.put_file(str(path), f"{self._base}/{name}/{path.name}")
                self._uploaded.add(name)
        for name in self._remote_checkpoints() - local.keys() if new else ():
            with suppress(FileNotFoundError):
                self._fs.rm_file(f"{self._base}/{name}/{_DESCRIPTION}")
                self._fs.rm(f"{self._base}/{name}", recursive=True)

    def _remote_checkpoints(self) -> set[str]:
        paths = self._fs.glob(f"{self._base}/step-*/{_DESCRIPTION}")
        return {PurePosixPath(str(path)).parts[-2] for path in paths}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Upload each new checkpoint in a thread. At the end, upload what is left."""
        try:
            with run_periodically(self._try_upload, _POLL_SECONDS):
                yield
        finally:
            self.upload()

    def _try_upload(self) -> bool:
        """Upload as :meth:`upload` does, but only log a failure. Return False, so that later checkpoints follow."""
        try:
            self.upload()
        except Exception as error:  # each file system has its own exceptions
            log.warning("A checkpoint could not be copied to %s: %s. Trying again.", self.url, error)
        return False
