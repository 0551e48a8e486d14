"""The debug mode of the kernels, TEXTMILL_KERNEL_BOUNDSCHECK=1: an index out of bounds raises IndexError."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.processes import PROJECT

_TEST_FILES = [
    *["kernels/test_scanners.py", "kernels/test_encode.py", "kernels/test_adversarial.py"],
    *["tokenizer/test_bpe.py", "tokenizer/test_pretoken_counts.py", "inference/runners/test_cpu_layers.py"],
    *["inference/runners/test_cpu_runner.py", "curate/test_counts.py", "curate/test_masks.py"],
    *["curate/test_normalized_words.py", "curate/test_minhash.py", "curate/test_near_duplicates.py"],
    *["curate/test_duplicate_lines.py", "curate/test_duplicate_documents.py", "curate/test_decontaminate.py"],
]
_ACCESS = """
import sys
import numpy as np
from lm.kernels.jit import kernel
from lm.kernels.simd import equal_in_block, in_range, load64, read, write

@kernel
def access(array, i, operation):
    if operation == 0:
        return np.uint64(array[i])
    if operation == 1:
        return np.uint64(read(array, i))
    if operation == 2:
        write(array, i, np.uint8(1))
        return np.uint64(0)
    if operation == 3:
        return load64(array, i)
    if operation == 4:
        return equal_in_block(array, i, np.uint8(0))
    return in_range(array, i, 0, 0, 255)

for operation, size in enumerate([1, 1, 1, 8, 64, 64]):
    array = np.zeros(100, np.uint8)
    access(array, 100 - size, operation)
    for i in (100 - size + 1, -1 if operation else -101):
        try:
            access(array, i, operation)
        except IndexError as error:
            assert operation == 0 or "access" in str(error), error
            continue
        sys.exit(f"operation {operation} accepts index {i}")
"""


def _debug_environment(**variables: str) -> dict[str, str]:
    return {**os.environ, "TEXTMILL_KERNEL_BOUNDSCHECK": "1", **variables}


@pytest.mark.slow
def test_indices_out_of_bounds_raise(tmp_path: Path) -> None:
    code = tmp_path / "access.py"
    code.write_text(_ACCESS)
    environment = _debug_environment(PYTHONPATH=str(PROJECT))
    done = subprocess.run([sys.executable, code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_no_index_of_the_kernel_tests_is_out_of_bounds() -> None:
    files = [PROJECT / "tests" / "lm" / name for name in _TEST_FILES]
    command: list[str | Path] = [sys.executable, "-m", "pytest", "-q", "-x", "--numprocesses=0", *files]
    done = subprocess.run(command, cwd=PROJECT, env=_debug_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-10_000:]
