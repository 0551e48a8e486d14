"""Recognition of files that are not what they are read as, by their first bytes."""

import re
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from lm.common.errors import UserError

_SIGNATURES = {
    b"\x1f\x8b": "compressed by gzip; add .gz to its name",
    b"\x28\xb5\x2f\xfd": "compressed by zstd; add .zst to its name",
    b"BZh": "compressed by bzip2; add .bz2 to its name",
    b"\xfd7zXZ\x00": "compressed by xz; add .xz to its name",
    b"\x04\x22\x4d\x18": "compressed by lz4; decompress it first",
    b"PAR1": "a Parquet file; name it .parquet",
    b"ARROW1": "an Arrow file; convert it to Parquet",
    b"%PDF-": "a PDF; extract its text first",
    b"PK\x03\x04": "a zip archive or an office document; unpack it or extract its text first",
    b"7z\xbc\xaf": "a 7z archive; unpack it first",
    b"Rar!\x1a\x07": "a rar archive; unpack it first",
    BOM_UTF16_LE: "UTF-16 or UTF-32; convert it: iconv -f UTF-16 -t UTF-8",
    BOM_UTF16_BE: "UTF-16; convert it: iconv -f UTF-16 -t UTF-8",
}
_BZIP2_BLOCK = b"1AY&SY"  # after a digit
_TEXT_FORMATS = {
    "JSON": re.compile(r'\s*(\{\s*"|\[\s*[\[{"])'),
    "HTML or XML": re.compile(r"\s*<(!doctype|html|\?xml)\b", re.IGNORECASE),
}
_TABLES = (".csv", ".tsv")
_NUL_PROBE_BYTES = 64


def refuse_binary(blocks: Iterable[bytes], url: str) -> Iterator[bytes]:
    """Yield ``blocks``. Raises UserError if they begin like a file that is not UTF-8 text."""

    def check(head: bytes) -> None:
        for signature, kind in _SIGNATURES.items():
            if head.startswith(signature) and (signature != b"BZh" or head[4:10] == _BZIP2_BLOCK):
                raise UserError(f"{url} is {kind}.")
        probe = head[:_NUL_PROBE_BYTES]
        if len(probe) >= 8 and any(probe[1::2]) != any(probe[::2]):  # ASCII as UTF-16 without a byte order mark
            raise UserError(f"{url} has a NUL in every other byte, as UTF-16 has; convert it to UTF-8 with iconv.")

    return _check_first_block(blocks, check)


def refuse_json_array(blocks: Iterable[bytes], url: str) -> Iterator[bytes]:
    """Yield the ``blocks`` of JSON Lines. Raises UserError if they begin with an array."""

    def check(head: bytes) -> None:
        if head.removeprefix(BOM_UTF8).lstrip().startswith(b"["):
            raise UserError(
                f"{url} begins with a JSON array, not with JSON Lines. Write one object a line: jq -c '.[]' FILE."
            )

    return _check_first_block(blocks, check)


def _check_first_block(blocks: Iterable[bytes], check: Callable[[bytes], None]) -> Iterator[bytes]:
    for number, block in enumerate(blocks):
        if not number:
            check(block)
        yield block


def text_format(url: str, head: str) -> str:
    """Return the format that a plain text has by its start, or a table by its name; empty for prose."""
    if Path(url.lower()).suffix in _TABLES:
        return "CSV"
    return next((name for name, start in _TEXT_FORMATS.items() if start.match(head)), "")
