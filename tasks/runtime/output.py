"""Outputs of stages: where they are, what their manifests say, and whether their files are intact."""

import hashlib
import json
import os
import posixpath
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

from lm.common.errors import StorageError, UserError
from tasks.runtime.run_context import RunContext
from tasks.runtime.schemas import Manifest, read_json_content, read_record
from tasks.runtime.store import Store

MANIFEST = "manifest.json"  # written last: without it there is no output
BASE_FILE = "base.json"  # of lm.checkpoint.adapter_base, which imports torch
PAGE = "page.md"  # beside the files of an output, but not part of its content
FORMAT = 1  # of manifests and of the files of all stages; a new number reruns everything


class Input(ABC):
    """An argument of a stage that stands for files of a root."""

    @abstractmethod
    def identity(self, run: RunContext) -> Any:
        """Return the part that enters a key, as JSON."""

    @abstractmethod
    def open(self, store: Store) -> Any:
        """Return what the body of the stage receives. Raises UserError if the files are missing or damaged."""

    @abstractmethod
    def find_damaged_url(self, store: Store, opened: Any) -> str:
        """Return the path or URL of a file that has changed since it was ``opened``; empty if there is none."""


class Ref(NamedTuple("Ref", [("stage", str), ("key", str)]), Input):
    """The result of a stage: where its manifest is. As an input, the body receives the :class:`Output`."""

    __slots__ = ()

    def identity(self, run: RunContext) -> dict[str, str]:
        """Return the content digest, which a run reads once. Raises UserError if there is no output."""
        if self not in run.digests:
            run.digests[self] = intact_digest(run.store, self) or read_output(run.store, self).digest
        return {self.stage: run.digests[self]}

    def open(self, store: Store) -> "Output":
        """Return the output. Raises UserError if it has no valid manifest."""
        return read_output(store, self)

    def find_damaged_url(self, store: Store, opened: "Output") -> str:
        """Return the path or URL of the first file that has changed; empty if there is none."""
        return opened.find_damaged_url()


@dataclass(frozen=True)
class Output:
    """The finished output of a stage, open for reading."""

    store: Store
    ref: Ref
    manifest: dict[str, Any]

    @property
    def digest(self) -> str:
        """Digest of the content: files, source digests and format."""
        content = {
            "format": self.manifest["format"],
            "files": self.manifest["files"],
            "sources": [source["sha256"] for source in self.manifest["sources"]],
        }
        return json_digest(content)

    @property
    def location(self) -> tuple[str, str, str]:
        """Path of the files below the root, in parts."""
        return (*self.ref, self.manifest["attempt"])

    @property
    def url(self) -> str:
        """Path or URL of the files, for display."""
        return self.store.url(*self.location)

    def path(self, name: str) -> Path:
        """Return the path of a file: in place on a local root, else of a copy in the user's cache.

        A copy lies at the same place below ``downloads/<root>`` as the file below its root, so the files of a directory
        stay together. It is checked as a file of a local root is: after a change it is downloaded again. Raises
        UserError if the file is damaged or the manifest does not name it.
        """
        for file in (*self.manifest["files"], *self.manifest["records"]):
            if file["path"] == name:
                break
        else:
            raise UserError(f"{self.ref.stage} {self.ref.key[:12]} has no file {name}.")
        copies = self.store.copies
        path = Path(copies.path(*self.location, name))
        if not self.store.is_local:
            with suppress(OSError):
                os.utime(copies.path(*self.location))  # remove_old_copies keeps it
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with FileLock(f"{path}.lock"):  # groups of chunks in other threads and processes use the same tokenizer
                    if copies.find_damaged([file], *self.location):
                        self.store.download(path, *self.location, name)
            except OSError as error:
                raise StorageError(f"The copy {path} cannot be written: {error.strerror or error}.") from None
        if copies.find_damaged([file], *self.location):
            damaged = self.store.path(*self.location, name)
            raise UserError(f"{damaged} is damaged or missing. Run the pipeline again: it makes it again.")
        return path

    def file_url(self, name: str) -> str:
        """Return the path or URL of a file in the root, for readers of byte ranges. It may be damaged."""
        return self.store.url(*self.location, name)

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Return the bytes ``start`` to ``end`` of a file, which may be damaged."""
        return self.store.read_range(start, end, *self.location, name)

    def directory(self, name: str) -> Path:
        """Return a local path of a directory with all its files, and of an adapter's checkpoint those of its base.

        Raises UserError as :meth:`path` does.
        """
        if name.startswith("step-"):
            self._fetch_base()
        paths = [self.path(file["path"]) for file in self.manifest["files"] if file["path"].startswith(f"{name}/")]
        if not paths:
            raise UserError(f"{self.ref.stage} {self.ref.key[:12]} has no directory {name}.")
        return paths[0].parent

    def _fetch_base(self) -> None:
        """Fetch the checkpoint below an adapter, if this is the output of a training that made one."""
        if any(file["path"] == BASE_FILE for file in self.manifest["records"]):
            path = posixpath.normpath(posixpath.join(*self.location, self.json(BASE_FILE)["checkpoint"]))
            stage, key, _, name = path.split("/")[-4:]
            read_output(self.store, Ref(stage, key)).directory(name)

    def json(self, name: str) -> Any:
        """Return the content of a JSON file. Raises UserError if it does not have the schema of its stage."""
        return read_json_content(self.path(name))

    @property
    def best_checkpoint(self) -> str:
        """Name of the directory of a training's best checkpoint."""
        return str(self.json("training.json")["best"])

    @property
    def page(self) -> str | None:
        """The Markdown page; None if the stage has none or the file is damaged."""
        page, data = self.manifest["page"], self.store.read_bytes(*self.location, PAGE)
        is_intact = page and data and hashlib.sha256(data).hexdigest() == page["sha256"]
        return data.decode("utf-8", "replace") if is_intact and data else None

    def all_files(self) -> list[dict[str, Any]]:
        """Return path, bytes and sha256 of all files: content, records and page."""
        page = self.manifest["page"]
        return [*self.manifest["files"], *self.manifest["records"], *([page] if page else [])]

    def find_damaged(self) -> list[str]:
        """Return the paths of the files, except the page, that are missing or changed."""
        files = [*self.manifest["files"], *self.manifest["records"]]
        return self.store.find_damaged(files, *self.location, etags=self.manifest["etags"])

    def find_damaged_url(self) -> str:
        """Return the path or URL of the first file that :meth:`find_damaged` names; empty if there is none."""
        damaged = self.find_damaged()
        return self.file_url(damaged[0]) if damaged else ""

    def is_intact(self) -> bool:
        """Return whether all files, except the page, have their size and digest."""
        return not self.find_damaged()


def open_output(store: Store, ref: Ref) -> Output | None:
    """Return an output if it has a valid manifest. Its files may be damaged."""
    manifest = read_record(Manifest, store, *ref, MANIFEST)
    if not manifest or (manifest["format"], manifest["stage"], manifest["key"]) != (FORMAT, *ref):
        return None
    return Output(store, ref, manifest)


def read_output(store: Store, ref: Ref) -> Output:
    """Return an output. Raises UserError if it has no valid manifest."""
    output = open_output(store, ref)
    if output is None:
        raise UserError(f"{store.path(*ref)} has no manifest of a finished {ref.stage}. Run the pipeline again.")
    return output


def intact_digest(store: Store, ref: Ref) -> str | None:
    """Return the content digest of an output; None if it is missing or damaged.

    The manifest is read only if a file of the output has changed since the last call on this machine.
    """
    path, fingerprint = "/".join(ref), store.fingerprint(*ref)
    if fingerprint is None:
        return None
    if digest := store.verified.digest(path, fingerprint):
        return digest
    output = open_output(store, ref)
    if not output or not output.is_intact():
        return None
    store.verified.add([(path, fingerprint, output.digest)])
    return output.digest


def json_digest(content: Any) -> str:
    """Return the sha256 of a value as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
