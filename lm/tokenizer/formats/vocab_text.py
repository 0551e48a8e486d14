"""Readable vocabulary files."""

from collections.abc import Iterable
from pathlib import Path


def write_vocab_text(path: Path, vocab: dict[int, bytes], merges: Iterable[tuple[bytes, bytes]]) -> None:
    """Write one line per token: its id, its Python string literal, and the two parts it was merged from."""
    parts = {left + right: (left, right) for left, right in merges}
    with path.open("w", encoding="utf-8") as file:
        for token_id, token in sorted(vocab.items()):
            left, right = parts.get(token, (b"", b""))
            origin = f"  = {_format_token(left)} + {_format_token(right)}" if left else ""
            file.write(f"{token_id:>6}  {_format_token(token)}{origin}\n")


def _format_token(token: bytes) -> str:
    return repr(token.decode("utf-8", "backslashreplace"))
