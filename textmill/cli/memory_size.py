"""Sizes of memory on the command line."""

import re
from argparse import ArgumentTypeError

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}
_UNITS |= {f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", 1)}


def memory_size(text: str | int) -> int:
    """Return the bytes of a size such as 4GB, 1.5GiB or 4000000. Raises ArgumentTypeError for any other text."""
    text = str(text)  # jsonargparse also passes what it has parsed
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([A-Z]*)", text.strip().upper())
    size = int(float(match[1]) * _UNITS.get(match[2], 0)) if match else 0
    if size < 1:
        raise ArgumentTypeError(f"{text[:40]!r} is no size of memory; write it as 4GB, 512MiB or a number of bytes")
    return size
