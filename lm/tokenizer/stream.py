"""Multithreaded encoding of text files to files of token ids."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

from lm.common.errors import InvalidUtf8Error
from lm.hardware.cpu import available_cpus
from lm.text.chunks import FilePart, split_files
from lm.tokenizer.added_tokens import needs_no_context
from lm.tokenizer.tokenizer import Tokenizer


def encode_files(
    paths: Sequence[str | Path], tokenizer: Tokenizer, directory: Path, threads: int | None = None
) -> list[Path]:
    """Encode text files, plain or compressed, to files of token ids in ``directory``, whose dtype is ``token_dtype``.

    Returns the files in the order of the text. ``threads`` defaults to the number of CPU cores. Raises UserError for a
    file that cannot be read or is not UTF-8.
    """
    directory.mkdir(parents=True, exist_ok=True)

    def encode(number: int, part: FilePart) -> Path:
        target = directory / f"{number:05}.bin"
        try:
            with part.open() as blocks, target.open("wb") as file:
                for ids in tokenizer.encode_blocks(blocks):
                    file.write(ids.data)
        except InvalidUtf8Error as error:
            raise part.locate(error) from None
        return target

    if needs_no_context(tokenizer.added_tokens, tokenizer.normalizer):
        contents = [token.content for token in tokenizer.added_tokens]
        parts = split_files(paths, contents, tokenizer.pattern)
    else:  # the text around a token may matter
        parts = (FilePart(str(path)) for path in paths)
    with ThreadPoolExecutor(threads or available_cpus()) as pool:
        return list(pool.map(encode, count(), parts))
