"""Copies of checkpoints on an object store, so that a training can resume on another machine."""

import logging
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from lm.checkpoint.training_checkpoint import ROW_FILES, read_description, step_directories, step_number
from lm.common.processes import run_periodically
from lm.files.atomic_dir import atomic_directory
from lm.files.retry import retry_request, translate_errors
from lm.files.urls import open_filesystem

log = logging.getLogger(__name__)

_POLL_SECONDS = 2.0
_HEARTBEAT_SECONDS = 5.0
_LOGS = ("job.json", *ROW_FILES)
_DESCRIPTION = "checkpoint.json"  # uploaded last: a checkpoint without it is incomplete


class CheckpointMirror:
    """Synchronizes the checkpoints of a local directory with those at a URL.

    Requests are repeated if the network fails. Raises TransientError or UserError if they fail in the end.
    """

    def __init__(self, directory: Path, url: str) -> None:
        self.directory, self.url = directory, url
        self._fs, self._base = open_filesystem(url)
        self._uploaded: set[str] = set()

    def download(self) -> None:
        """Download the checkpoints that are missing or damaged locally, and the logs if they are missing or older."""
        self.directory.mkdir(parents=True, exist_ok=True)
        intact = {path.name for path in step_directories(self.directory) if read_description(path)}
        remote = sorted(self._remote_names(_DESCRIPTION), key=step_number)
        for name in remote:
            if name not in intact:
                with atomic_directory(self.directory / name) as temporary:
                    self._request(self._fs.get, f"{self._base}/{name}/", f"{temporary}/", recursive=True)
                log.info("Fetched the checkpoint %s from %s.", name, self.url)
            self._uploaded.add(name)
        is_behind = bool(remote) and step_number(remote[-1]) > max(map(step_number, intact), default=-1)
        for name in _LOGS:
            if is_behind or not (self.directory / name).exists():
                temporary = self.directory / f"{name}.tmp"
                with suppress(FileNotFoundError):
                    self._request(self._fs.get_file, f"{self._base}/{name}", str(temporary))
                    temporary.replace(self.directory / name)

    def upload(self) -> None:
        """Upload newer checkpoints than those at the URL, and the logs. Then delete checkpoints there that no longer
        exist locally."""
        local = {path.name: path for path in step_directories(self.directory)}
        self._forget_deleted()
        newest = max(map(step_number, self._uploaded), default=-1)
        if new := [name for name in local if step_number(name) > newest]:
            for name in _LOGS:
                if (self.directory / name).exists():
                    self._request(self._fs.put_file, str(self.directory / name), f"{self._base}/{name}")
        for name in new:
            try:
                paths = sorted(local[name].iterdir(), key=lambda path: path.name == _DESCRIPTION)
                for path in paths:
                    self._request(self._fs.put_file, str(path), f"{self._base}/{name}/{path.name}")
                self._uploaded.add(name)
            except FileNotFoundError:  # the training has deleted it during the upload
                self._delete(name)
        for name in self._remote_names("*") - local.keys() if new else ():
            self._delete(name)

    def _request(self, operation: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call the file system of the URL, and retry if the network fails."""
        attempt = partial(operation, *arguments, **options)
        return retry_request(translate_errors, f"The checkpoints at {self.url}", attempt)

    def _remote_names(self, file: str) -> set[str]:
        """Return the names of the checkpoints at the URL that have a file of this name, which may be a glob."""
        paths = self._request(self._fs.glob, f"{self._base}/step-*/{file}")
        names = {PurePosixPath(str(path)).parts[-2] for path in paths}
        return {name for name in names if step_number(name) >= 0}

    def _forget_deleted(self) -> None:
        """Forget uploads of checkpoints that no longer exist locally: a checkpoint of this name is another one."""
        self._uploaded.intersection_update(path.name for path in step_directories(self.directory))

    def _delete(self, name: str) -> None:
        with suppress(FileNotFoundError):  # the description first: without it there is no checkpoint
            self._request(self._fs.rm_file, f"{self._base}/{name}/{_DESCRIPTION}")
        with suppress(FileNotFoundError):
            self._request(self._fs.rm, f"{self._base}/{name}", recursive=True)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Upload new checkpoints in a background thread. At the end, upload the remaining ones."""
        self._forget_deleted()  # the training may save such a checkpoint again before the first upload

        def try_upload() -> bool:
            try:
                self.upload()
            except Exception as error:  # each file system has its own exceptions
                log.warning("A checkpoint could not be uploaded to %s: %s. Trying again.", self.url, error)
            return False

        try:
            with run_periodically(try_upload, _POLL_SECONDS):
                yield
        finally:
            self.upload()


@contextmanager
def send_heartbeats(url: str) -> Iterator[None]:
    """Rewrite the file at ``url`` every few seconds, in a background thread, and delete it at the end.

    ``textmill gc`` deletes nothing from a root while such a file below ``leases/`` changes.
    """
    fs, path = open_filesystem(url)

    def send() -> bool:
        with suppress(Exception):  # the network may recover; each file system has its own exceptions
            fs.pipe_file(path, uuid.uuid4().hex.encode())
        return False

    send()
    try:
        with run_periodically(send, _HEARTBEAT_SECONDS):
            yield
    finally:
        with suppress(Exception):
            fs.rm_file(path)
