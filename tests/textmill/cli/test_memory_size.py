"""Sizes of memory on the command line."""

from argparse import ArgumentTypeError

import pytest

from textmill.cli.memory_size import memory_size


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4GB", 4 * 10**9),
        ("512MiB", 512 << 20),
        ("1.5 gib", 3 << 29),
        ("4000", 4000),
        (7, 7),
        ("2B", 2),
        ("1TB", 10**12),
    ],
)
def test_sizes(text: str | int, expected: int) -> None:
    assert memory_size(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "0", "0.1B", "-1GB", "4XB", "1e9", "4 G B", "9" * 99, "٣GB", "nan"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="is no size of memory; write it as 4GB"):
        memory_size(text)
