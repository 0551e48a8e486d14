"""The outputs of stages: where one is, what its manifest says, and whether its files are as they were made."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lm.errors import UserError
from tasks.records import Manifest, read, read_content
from tasks.store import Store

MANIFEST = "manifest.json"  # of an output, written last: without it nothing counts
PAGE = "page.md"  # beside the files of an output, for a person; no part of it
FORMAT = 1  # of the manifest and of what the stages write; a change makes everything anew


class Ref(NamedTuple):
    """The result of a stage: where its manifest is."""

    stage: str
    key: str


@dataclass(frozen=True)
class Output:
    """The finished output of a stage, opened for reading."""

    store: Store
    ref: Ref
    manifest: dict[str, Any]

    @property
    def digest(self) -> str:
        """Digest of the content: files, source digests and format, nothing that changes from run to run."""
        content = {
            "format": self.manifest["format"],
            "files": self.manifest["files"],
            "sources": [source["sha256"] for source in self.manifest["sources"]],
        }
        return digest_of(content)

    def path(self, name: str) -> Path:
        """A local path of one of the files, intact; raises UserError when the output has no such file of that name."""
        for file in (*self.manifest["files"], *self.manifest["records"]):
            if file["path"] == name:
                return self.store.local(file["bytes"], file["sha256"], *self.place, name)
        raise UserError(f"{self.ref.stage} {self.ref.key[:12]} has no file {name}.")

    def directory(self, name: str) -> Path:
        """A local path of a directory of the output, all its files fetched."""
        paths = [self.path(file["path"]) for file in self.manifest["files"] if file["path"].startswith(f"{name}/")]
        if not paths:
            raise UserError(f"{self.ref.stage} {self.ref.key[:12]} has no directory {name}.")
        return paths[0].parent

    @property
    def page(self) -> str | None:
        """What there is to show of it, in Markdown; None for a part of a mapped stage, and where it is not intact."""
        page, data = self.manifest["page"], self.store.read_bytes(*self.place, PAGE)
        is_intact = page and data and hashlib.sha256(data).hexdigest() == page["sha256"]
        return data.decode("utf-8", "replace") if is_intact and data else None

    def json(self, name: str) -> Any:
        """The content of a JSON file; raises UserError where it is not as its stage writes it."""
        return read_content(self.path(name))

    @property
    def url(self) -> str:
        """Where the files are."""
        return self.store.url(*self.place)

    @property
    def place(self) -> tuple[str, str, str]:
        """Where the files are, below the root."""
        return (*self.ref, self.manifest["attempt"])

    def described(self) -> list[dict[str, Any]]:
        """All files, with what only a person reads."""
        page = self.manifest["page"]
        return [*self.manifest["files"], *self.manifest["records"], *([page] if page else [])]

    def is_intact(self) -> bool:
        """Whether every file is there with its size and digest."""
        return not any(self.damaged())

    def damaged(self) -> Iterator[str]:
        """The files that are not there with their size and digest."""
        for file in (*self.manifest["files"], *self.manifest["records"]):
            if not self.store.is_intact(file["bytes"], file["sha256"], *self.place, file["path"]):
                yield file["path"]


def open_output(store: Store, ref: Ref) -> Output | None:
    """The output of a stage if its manifest is there; its files may still be damaged."""
    manifest = read(Manifest, store, *ref, MANIFEST)
    if not manifest or (manifest["format"], manifest["stage"], manifest["key"]) != (FORMAT, *ref):
        return None
    return Output(store, ref, manifest)


def read_output(store: Store, ref: Ref) -> Output:
    """The output of a stage that has run; raises UserError when it is gone."""
    output = open_output(store, ref)
    if output is None:
        raise UserError(f"{store.path(*ref)} has no manifest of a finished {ref.stage}; run the pipeline again.")
    return output


def digest_of(content: Any) -> str:
    """sha256 of what is written as JSON, its keys in order."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
