"""Documents that lie in files, each as a range of bytes: read by their numbers; and the files of an output."""

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import numpy as np

from lm.common.errors import StorageError, UserError
from lm.curate.document_batch import DocumentBatch, pack_utf8
from lm.kernels.jit import Int64s
from lm.text.sources import open_raw

Paths = Sequence[str | PathLike[str]]


@dataclass(frozen=True)
class DocumentFiles:
    """N documents in uncompressed files. Document i is ``paths[files[i]]`` from ``begins[i]`` to ``ends[i]``."""

    paths: Sequence[Path | str]
    """Paths or URLs."""
    files: Int64s
    """(N,): indices into ``paths``, ascending."""
    begins: Int64s
    """(N,), in bytes."""
    ends: Int64s
    """(N,), in bytes."""

    @classmethod
    def whole_files(cls, paths: Sequence[Path]) -> "DocumentFiles":
        """Return one document for each file."""
        numbers = np.arange(len(paths))
        sizes = np.array([path.stat().st_size for path in paths], np.int64)
        return cls(paths, numbers, np.zeros_like(sizes), sizes)

    @property
    def sizes(self) -> Int64s:
        """Bytes of each document, int64 (N,)."""
        return self.ends - self.begins

    def read(self, documents: Int64s) -> DocumentBatch:
        """Return the documents of these numbers. Raises StorageError if a file cannot be read, or is too short."""
        texts: list[bytes] = []
        for file in np.unique(self.files[documents]):
            path = self.paths[file]
            chosen = documents[self.files[documents] == file]
            try:
                with open_raw(str(path), is_ranged=True) as stream:
                    for begin, end in zip(self.begins[chosen].tolist(), self.ends[chosen].tolist(), strict=True):
                        stream.seek(begin)
                        texts.append(stream.read(end - begin))
                        if len(texts[-1]) != end - begin:
                            raise StorageError(f"{path} changed while it was read; run the command again.")
            except OSError as error:
                raise StorageError(f"{path} cannot be read: {error.strerror or error}.") from None
        return pack_utf8(texts)


def output_paths(input_files: Paths, output_directory: str | PathLike[str]) -> tuple[list[Path], list[Path]]:
    """Return the input files and a path in a new or existing directory for each, under the same name.

    Raises UserError if a file is missing, if two have one name, or if an output would replace an input.
    """
    paths, folder = [Path(path) for path in input_files], Path(output_directory)
    names: dict[str, Path] = {}
    for path in paths:
        if not path.is_file():
            raise UserError(f"{path} is not a file; name existing files.")
        if path.name in names:
            raise UserError(f"{names[path.name]} and {path} have the same name; rename one of them.")
        names[path.name] = path
        if (folder / path.name).exists() and (folder / path.name).samefile(path):
            raise UserError(f"{path} would be replaced; choose another output directory.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{folder} cannot be made: {error.strerror or error}.") from None
    return paths, [folder / path.name for path in paths]
