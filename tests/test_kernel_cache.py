"""The compiled kernels on disk: what a start says, changed sources, folders that cannot be used."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import lm

# Compiles everything that encoding needs: some seconds.
ENCODE = """
from lm.tokenizer import Tokenizer
tokenizer = Tokenizer({i: bytes([i]) for i in range(256)} | {256: b"ab", 257: b" ab"}, [(b"a", b"b"), (b" ", b"ab")])
print(tokenizer.encode("ab ab abc"))
"""
ENCODED = "[256, 257, 257, 99]"

# One kernel, with helpers in other files.
SCAN = """
import numpy as np
from lm.kernels import compiling
from lm.kernels.classes import character_classes
from lm.kernels.scan import scan
buffer = np.zeros(256, np.uint8)
buffer[:9] = np.frombuffer(b"one two 3", np.uint8)
starts = np.empty(256, np.int32)
with compiling("scan"):
    print(starts[: scan(buffer, 0, 9, character_classes(), starts)].tolist())
"""
SCANNED = "[0, 3, 7]"

# Put at the end of a helper's file: every place is one further.
CHANGED_HELPER = """

@intrinsic
def first_bit(typingctx: Any, word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.add(builder.cttz(arguments[0], cgutils.false_bit), ir.Constant(_WORD, 1))

    return types.int64(types.uint64), generate
"""
SCANNED_BY_IT = "[1, 4, 8]"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A folder with a copy of the package, without anything compiled."""
    shutil.copytree(Path(lm.__file__).parent, tmp_path / "copy" / "lm", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "copy"


def start(folder: Path, code: str, cache: Path, **environment: str) -> tuple[str, str]:
    """(what it prints, what it says) of a process that has the package from ``folder`` and another home."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    own = {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "HOME": str(folder), "XDG_CACHE_HOME": str(cache)}
    environment = {**inherited, **own, **environment}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


def change_helper(folder: Path) -> None:
    with (folder / "lm" / "kernels" / "simd.py").open("a") as file:
        file.write(CHANGED_HELPER)


def test_the_first_start_says_that_it_compiles_and_the_next_says_nothing(copy: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    printed, said = start(copy, ENCODE, cache)
    assert printed == ENCODED
    what = set(re.findall(r"Compiling the ([\w ]+) kernels for this processor, once", said))
    assert "encoding uint16" in what
    assert set(re.findall(r"Compiled the ([\w ]+) kernels in \d+\.\d s", said)) == what
    [folder] = (cache / "textmill" / "kernels").iterdir()
    assert str(folder) in said
    assert start(copy, ENCODE, cache) == (ENCODED, "")
    assert not (copy / "lm" / "kernels" / "__pycache__").exists()


def test_a_copy_of_the_package_elsewhere_says_that_it_compiles(copy: Path, tmp_path: Path) -> None:
    """The machine code belongs to a path: that of another environment is of no use to this one."""
    cache, other = tmp_path / "cache", tmp_path / "other"
    start(copy, SCAN, cache)
    compiled = len(list(cache.rglob("*.nbc")))
    shutil.copytree(copy, other)
    printed, said = start(other, SCAN, cache)
    assert printed == SCANNED
    assert len(list(cache.rglob("*.nbc"))) == compiled or "Compiling the scan kernels" in said


def test_a_change_of_a_helper_is_seen_though_the_cache_is_warm(copy: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert start(copy, SCAN, cache)[0] == SCANNED
    assert start(copy, SCAN, cache) == (SCANNED, "")
    change_helper(copy)
    printed, said = start(copy, SCAN, cache)
    assert printed == SCANNED_BY_IT
    assert "Compiling the scan kernels" in said


def test_a_cache_that_cannot_be_written_is_no_hindrance(copy: Path, tmp_path: Path) -> None:
    """Nor does it bring back the machine code of other sources."""
    cache = tmp_path / "file"
    cache.touch()
    assert start(copy, SCAN, cache)[0] == SCANNED
    assert start(copy, SCAN, cache)[0] == SCANNED
    change_helper(copy)
    assert start(copy, SCAN, cache)[0] == SCANNED_BY_IT


def test_nothing_can_be_written_anywhere(copy: Path, tmp_path: Path) -> None:
    """As in a container with a read-only system: neither the cache, nor the home, nor the package's own folder."""
    cache = tmp_path / "file"
    cache.touch()
    (copy / "lm" / "kernels" / "__pycache__").touch()
    assert start(copy, SCAN, cache, HOME=str(cache))[0] == SCANNED


def test_without_a_setting_the_cache_is_in_the_home_folder(copy: Path, tmp_path: Path) -> None:
    printed, _ = start(
        copy, "import lm.kernels; print(lm.kernels.CACHE)", Path(), XDG_CACHE_HOME="", HOME=str(tmp_path)
    )
    assert Path(printed).is_relative_to(tmp_path / ".cache" / "textmill")
