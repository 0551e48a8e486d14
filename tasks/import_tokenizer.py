"""Stage ``tokenizer``: the tokenizer of others, from its files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm.common.errors import UserError
from lm.text.sources import Source
from tasks.runtime.output import Ref, read_output
from tasks.runtime.run_context import Attempt
from tasks.runtime.source_records import describe_sources, keep_unchanged
from tasks.runtime.stage import stage
from tasks.runtime.store import Store

_FILES = ("tokenizer.model", "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt")


def find_tokenizer_files(path: Path, store: Store) -> list[Source]:
    """Return the files of a tokenizer with their digests. ``path``: a file, or a directory with files.

    Raises UserError if the directory has none.
    """
    place = path.resolve()
    files = [place] if place.is_file() else [place / name for name in _FILES if (place / name).exists()]
    if not files:
        raise UserError(f"{path} has no tokenizer of its own; name the directory or the file that has it.")
    return describe_sources([str(file) for file in files], store)


@stage("tokenizer")
def import_tokenizer(out: Attempt, files: list[Source], separator: str) -> None:
    """Write the tokenizer. If ``separator``, which ends a document, is no special token, it becomes the last id.

    Raises UserError if the files cannot be read, or are SentencePiece's.
    """
    from lm.checkpoint.external import load_any_tokenizer
    from lm.tokenizer.text_tokenizer import require_byte_level
    from lm.tokenizer.tokenizer import Tokenizer

    paths = [Path(file.url.removeprefix("file://")) for file in files]
    place = paths[0] if len(paths) == 1 else paths[0].parent
    out.sources = files
    with keep_unchanged(files, out.run.store):
        tokenizer = require_byte_level(load_any_tokenizer(place), str(place))
        if separator not in tokenizer.special_tokens:
            parts = tokenizer.parts
            tokenizer = Tokenizer(*parts._replace(special_tokens=[*parts.special_tokens, separator]))
        tokenizer.save(out.directory / "tokenizer")
    out.figures = {"vocab_size": tokenizer.size}


def read_tokenizer(store: Store, tokenizer: Ref, separator: str, name: str) -> Sequence[Any]:
    """Return the special tokens and the pattern of a tokenizer. Raises UserError, with its ``name``, if ``separator``
    is no special token."""
    from lm.tokenizer.tokenizer import Tokenizer

    loaded = Tokenizer.load(read_output(store, tokenizer).directory("tokenizer"))
    if separator not in loaded.special_tokens:
        known = ", ".join(map(repr, loaded.special_tokens)) or "none"
        raise UserError(
            f"The tokenizer {name} lacks the special token {separator!r}, which ends a document: it has {known}. Leave "
            "it out of a comparison with --train_flops."
        )
    return [loaded.special_tokens, loaded.pattern]
