"""SHA-256 checksums: of files, and JSON documents that carry one of themselves, so that damage is detected.

The checksum has no key: it protects against accidents, not against an attacker.
"""

import hashlib
import json
from typing import IO, Any


def dumps_with_checksum(content: dict[str, Any]) -> str:
    """Return ``content`` as JSON with an added ``sha256`` field. Raises ValueError for nan and infinity."""
    digest = hashlib.sha256(json.dumps(content, allow_nan=False).encode()).hexdigest()
    return json.dumps({**content, "sha256": digest}, indent=1)


def loads_with_checksum(data: bytes) -> dict[str, Any] | None:
    """Parse the output of :func:`dumps_with_checksum`. Returns None if any byte differs from what it wrote."""
    try:
        text = data.decode()
        content = json.loads(text)
        del content["sha256"]
        is_intact = text == dumps_with_checksum(content)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    # At most 32 levels of nesting: more than any file of this project has, and safe for recursive readers.
    return content if is_intact and "\n" + " " * 32 not in text else None


def file_checksum(file: IO[bytes]) -> str:
    """Return the SHA-256 of an open binary file in hexadecimal, and close the file."""
    with file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
