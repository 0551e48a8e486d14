"""Documents of texts in bounded memory: split at separators, in batches; and the text of those that are kept."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

MAX_DOCUMENT_BYTES = 16 << 20  # a longer one is not looked at
_BATCH_BYTES = 8 << 20


class Document(NamedTuple):
    """A document without its separator."""

    data: bytes
    """UTF-8; of a document of more than MAX_DOCUMENT_BYTES the beginning, which may end inside a character."""
    size: int
    """Bytes of the whole document."""
    start: int
    """Where it begins, in bytes from the beginning of the blocks."""

    @property
    def is_whole(self) -> bool:
        """Whether ``data`` is the whole document."""
        return self.size == len(self.data)


def read_documents(blocks: Iterable[bytes], separator: str, max_bytes: int = MAX_DOCUMENT_BYTES) -> Iterator[Document]:
    """Yield the documents of the concatenated ``blocks``, which are valid UTF-8.

    The last one may lack its separator. White space after the last separator is no document. The documents are those of
    :func:`lm.text.documents.split_documents`.
    """
    end_mark = separator.encode()
    parts: list[bytes] = []  # of the current document, without ``tail``; no more than max_bytes
    size = start = 0  # of the current document
    tail = b""  # the last bytes; they may be the start of a separator

    def end(ending: bytes) -> Document:
        return Document(b"".join([*parts, ending])[:max_bytes], size + len(ending), start)

    for block in blocks:
        *endings, rest = (tail + block).split(end_mark)
        for ending in endings:
            yield (document := end(ending))
            start += document.size + len(end_mark)
            parts.clear()
            size = 0
        cut = max(0, len(rest) - len(end_mark) + 1)
        piece, tail = rest[:cut], rest[cut:]
        if room := max(0, max_bytes - size):
            parts.append(piece[:room])
        size += len(piece)
    last = end(tail)
    if last.data and not (last.is_whole and last.data.decode("utf-8", "replace").isspace()):
        yield last


def batch_documents(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Yield the documents in lists of some MB."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.data)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
