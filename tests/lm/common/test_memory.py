"""The memory that this machine or container has."""

import os
from pathlib import Path

import pytest

from lm.common.memory import machine_memory

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, MACHINE),
        ({"memory.max": "max\n"}, MACHINE),
        ({"memory.max": f"{4 << 20}\n"}, 4 << 20),
        ({"memory.max": f"{1 << 62}\n"}, MACHINE),
        ({"memory.max": "damaged"}, MACHINE),
        ({"memory/memory.limit_in_bytes": f"{3 << 20}\n"}, 3 << 20),
        ({"memory/memory.limit_in_bytes": "9223372036854771712\n"}, MACHINE),
    ],
)
def test_the_limit_of_a_container_counts(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert machine_memory(tmp_path) == expected
