"""The kernel cache on disk: log messages, changed sources, folders that are not writable, several processes."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import lm
from lm import compile_kernels
from lm.tokenizer import Tokenizer

# One kernel, with a helper in another file: exports the only pretoken of a table.
EXPORT = """
import numpy as np
from lm.kernels.jit import log_compilation
from lm.kernels.bpe.count import export_columns
from lm.kernels.bpe.pretoken_table import make_table
table = make_table(2, 0)
table.slots[:3] = ord("a"), 1 << 56, 5
data, ends, counts = np.zeros(17, np.uint8), np.zeros(2, np.int32), np.zeros(1, np.int64)
with log_compilation("table"):
    export_columns(table, data, ends, counts)
print(data[: ends[1]].tobytes().decode(), counts[0])
"""
EXPORTED = "a 5"

# Appended to the file of helpers: each word is stored plus 1.
CHANGED_HELPER = """

@operation(lambda buffer, at, word: types.void(buffer, types.int64, types.uint64))
def store64(context: Any, builder: Any, args: Any, array: Any, index: Any, word: Any) -> None:
    address = builder.bitcast(address_of(context, builder, args[0], array, index), _I64.as_pointer())
    builder.store(builder.add(word, _I64(1)), address, align=1)
"""
EXPORTED_WITH_CHANGE = "b 5"

COMPILE_ALL = "import runpy; runpy.run_module('lm.compile_kernels', run_name='__main__')"
PRINT_CACHE_DIR = "from lm.kernels.disk_cache import CACHE_DIR; print(CACHE_DIR)"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A folder with a copy of the package, without compiled files."""
    shutil.copytree(Path(lm.__file__).parent, tmp_path / "copy" / "lm", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "copy"


def start(folder: Path, code: str, cache: Path, **environment: str) -> tuple[str, str]:
    """Run code with the package in ``folder``; return (standard output, standard error)."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    own = {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "HOME": str(folder), "XDG_CACHE_HOME": str(cache)}
    environment = {**inherited, **own, **environment}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


def change_helper(folder: Path) -> None:
    with (folder / "lm" / "kernels" / "simd.py").open("a") as file:
        file.write(CHANGED_HELPER)


@pytest.fixture(scope="module")
def first_start(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """A folder with a copy of the package, the cache after a first start with EXPORT, and its log. Read only."""
    folder, cache = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("cache")
    shutil.copytree(Path(lm.__file__).parent, folder / "lm", ignore=shutil.ignore_patterns("__pycache__"))
    output, log = start(folder, EXPORT, cache)
    assert output == EXPORTED
    return folder, cache, log


@pytest.fixture
def warm_cache(first_start: tuple[Path, Path, str], tmp_path: Path) -> Path:
    """A copy of the cache of ``first_start``."""
    return Path(shutil.copytree(first_start[1], tmp_path / "warm"))


@pytest.mark.slow
def test_only_the_first_start_logs_that_it_compiles(first_start: tuple[Path, Path, str]) -> None:
    copy, cache, log = first_start
    assert "Compiling the table kernels for this CPU, once" in log
    assert re.search(r"Compiled the table kernels in \d+\.\d s", log)
    [folder] = (cache / "textmill" / "kernels").iterdir()
    assert str(folder) in log
    assert start(copy, EXPORT, cache) == (EXPORTED, "")
    assert not (copy / "lm" / "kernels" / "__pycache__").exists()


def test_encoding_logs_once_a_machine_which_kernels_it_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("lm.kernels.jit.CACHE_DIR", tmp_path)
    for _ in range(2):  # the second time as in another process of the machine
        monkeypatch.setattr("lm.kernels.jit._logged", set())
        Tokenizer({i: bytes([i]) for i in range(256)}, []).encode("ab ab abc")
    for verb in ("Compiling", "Compiled"):
        assert re.findall(rf"{verb} the ([\w ]+) kernels", caplog.text) == ["pair table", "encoding uint16"]


@pytest.mark.slow
def test_another_folder_and_a_changed_helper_are_compiled_with_a_warm_cache(
    first_start: tuple[Path, Path, str], warm_cache: Path, tmp_path: Path
) -> None:
    """The cache depends on the path of the sources, and on the helpers in other files."""
    other = tmp_path / "other"
    shutil.copytree(first_start[0], other)
    compiled = len(list(warm_cache.rglob("*.nbc")))
    output, log = start(other, EXPORT, warm_cache)
    assert output == EXPORTED
    assert len(list(warm_cache.rglob("*.nbc"))) == compiled or "Compiling the table kernels" in log
    change_helper(other)
    output, log = start(other, EXPORT, warm_cache)
    assert output == EXPORTED_WITH_CHANGE
    assert "Compiling the table kernels" in log


@pytest.mark.slow
def test_a_cache_removed_meanwhile_ends_no_program(first_start: tuple[Path, Path, str], tmp_path: Path) -> None:
    call = "    export_columns(table, data, ends, counts)\n"
    removal = "    import shutil; from lm.kernels.disk_cache import CACHE_DIR; shutil.rmtree(CACHE_DIR)\n"
    output, log = start(first_start[0], EXPORT.replace(call, removal + call + removal), tmp_path / "cache")
    assert output == EXPORTED
    assert "Compiled the table kernels" in log


@pytest.mark.slow
def test_a_damaged_file_is_compiled_again(first_start: tuple[Path, Path, str], warm_cache: Path) -> None:
    """A power failure may leave empty files."""
    for suffix in ("nbi", "nbc"):
        for path in (damaged := [*warm_cache.rglob(f"*.{suffix}")]):
            path.write_bytes(b"")
        output, log = start(first_start[0], EXPORT, warm_cache)
        assert damaged and output == EXPORTED and "is damaged" in log
    assert start(first_start[0], EXPORT, warm_cache) == (EXPORTED, "")


@pytest.mark.slow
def test_a_cache_that_is_not_writable(copy: Path, tmp_path: Path) -> None:
    """The kernels are compiled at each start, from the current sources."""
    cache = tmp_path / "file"
    cache.touch()
    output, log = start(copy, EXPORT, cache)
    assert output == EXPORTED and "Compiling the table kernels for this CPU, at each start" in log
    change_helper(copy)
    assert start(copy, EXPORT, cache)[0] == EXPORTED_WITH_CHANGE


def test_no_writable_folder(copy: Path, tmp_path: Path) -> None:
    """As in a container with a read-only file system."""
    cache = tmp_path / "file"
    cache.touch()
    (copy / "lm" / "kernels" / "__pycache__").touch()
    assert start(copy, EXPORT, cache, HOME=str(cache))[0] == EXPORTED


def test_the_cache_is_in_the_home_folder_by_default(copy: Path, tmp_path: Path) -> None:
    output, _ = start(copy, PRINT_CACHE_DIR, Path(), XDG_CACHE_HOME="", HOME=str(tmp_path))
    assert Path(output).is_relative_to(tmp_path / ".cache" / "textmill")


# Counts and encodes with another pattern, and an id of 17 bits.
OTHER_PATTERN = """
from pathlib import Path
from lm.kernels.jit import KERNELS
from lm.text.patterns import PATTERNS
from lm.tokenizer import Tokenizer
from lm.tokenizer.pretoken_counts import DEFAULT_MEMORY_BYTES, count_to_file
pattern = PATTERNS["llama3"]
count_to_file(Path("counts.parquet"), [[b"One day, 2 days."]], [], pattern, DEFAULT_MEMORY_BYTES)
vocab = {i: bytes([i]) for i in range(256)} | {70_000: b"ab"}
print(Tokenizer(vocab, [(b"a", b"b")], pattern=pattern).encode("ab"))
print("compiled:", sum(sum(kernel.stats.cache_misses.values()) for kernel in KERNELS))
"""


@pytest.mark.long
def test_another_pattern_and_wider_ids_are_compiled_ahead_of_time(copy: Path, tmp_path: Path) -> None:
    arguments = "import sys; sys.argv[1:] = ['--pattern', 'llama3', '--id-bits', '32']; "
    start(copy, arguments + COMPILE_ALL, tmp_path / "cache")
    output, log = start(copy, OTHER_PATTERN, tmp_path / "cache")
    assert output.splitlines() == ["[70000]", "compiled: 0"] and "Compiling" not in log
    assert [path.name for path in (tmp_path / "cache").rglob("pipeline-*")] == ["pipeline-llama3-32.compiled"]


# Runs the stages of the pipeline and prints how many kernels this compiled.
PIPELINE = """
from pathlib import Path
from lm.tokenizer.bpe import train_bpe
from lm.inference.engine import generate
from lm.inference.generation_request import Generation
from lm.inference.runners.runner import prepare_for_inference
from lm.kernels.jit import KERNELS
from lm.compile_kernels import kernel_groups
from lm.model import ModelConfig, TransformerLM
from lm.tokenizer.stream import encode_files
from lm.tokenizer import Tokenizer
vocab, merges = train_bpe("text.txt", 300, ["<|endoftext|>"], threads=2)
tokenizer = Tokenizer(vocab, merges, ["<|endoftext|>"])
encode_files([Path("text.txt")], tokenizer, Path("ids"), 2)
assert list(tokenizer.encode_iterable(["a<|endoftext|>b"])) == [97, 256, 98]
model = prepare_for_inference(TransformerLM(ModelConfig(300, 16, d_model=16, num_layers=1, num_heads=2, d_ff=16)))
generate(model, [Generation([1, 2], 4)])
print("pipeline:", sum(sum(kernel.stats.cache_misses.values()) for kernel in KERNELS))
for run_group in kernel_groups().values():
    run_group()
print("never run:", [kernel.py_func.__name__ for kernel in KERNELS if not kernel.signatures])
"""


@pytest.mark.long
def test_the_pipeline_compiles_nothing_after_compilation_ahead_of_time(copy: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (copy / "text.txt").write_text("One day.<|endoftext|>Two days, \u20ac 3.\n" * 40)
    output, _ = start(copy, COMPILE_ALL, cache)
    assert re.search(r"counting +4 compiled, \d+\.\d s\n", output)
    num_compiled = sum(map(int, re.findall(r" (\d+) compiled, ", output)))  # one more with AVX2 than with AVX-512
    assert re.search(rf"\n{num_compiled} kernels compiled in \d+\.\d s$", output)
    [folder] = (cache / "textmill" / "kernels").iterdir()
    assert str(folder) in output
    files = {path: path.stat().st_mtime_ns for path in folder.glob("*.nb*")}
    output, log = start(copy, PIPELINE, cache)
    assert output.splitlines() == ["pipeline: 0", "never run: []"]
    assert "Compiling" not in log
    output, _ = start(copy, COMPILE_ALL, cache)
    assert output.endswith("nothing was compiled.")
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*.nb*")} == files


def test_compilation_ahead_of_time_needs_a_writable_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_kernels, "IS_CACHE_WRITABLE", False)
    monkeypatch.setattr(sys, "argv", ["lm.compile_kernels"])
    with pytest.raises(SystemExit, match="Set XDG_CACHE_HOME"):
        compile_kernels.main()


def test_only_folders_unused_for_a_month_are_removed(copy: Path, tmp_path: Path) -> None:
    kernels = tmp_path / "textmill" / "kernels"
    ages = {"0" * 16: 31, "1" * 16: 29, "notes": 99}  # days
    for name, days in ages.items():
        (kernels / name).mkdir(parents=True)
        (kernels / name / "file").touch()
        os.utime(kernels / name, (0, time.time() - days * 24 * 3600))
    own, _ = start(copy, PRINT_CACHE_DIR, tmp_path)
    assert {path.name for path in kernels.iterdir()} == {"1" * 16, "notes", Path(own).name}
    os.utime(own, (0, 0))
    start(copy, PRINT_CACHE_DIR, tmp_path)  # updates the modification time
    change_helper(copy)
    other, _ = start(copy, PRINT_CACHE_DIR, tmp_path)
    assert {path.name for path in kernels.iterdir()} == {"1" * 16, "notes", Path(own).name, Path(other).name}


def test_other_packages_keep_their_cache(copy: Path, tmp_path: Path) -> None:
    (copy / "other.py").write_text(
        """
import lm.kernels
import numba
@numba.njit(cache=True)
def more(number):
    return number + 1
print(more(1), numba.config.CACHE_DIR)
"""
    )
    own = str(tmp_path / "own")
    assert start(copy, "import other", tmp_path / "cache", NUMBA_CACHE_DIR=own)[0] == f"2 {own}"
    assert list(Path(own).rglob("other.more*.nbc"))
    assert not list((tmp_path / "cache").rglob("*.nbc"))


COMPILE_SLOWLY = """
import sys, time
from lm.kernels.jit import KERNELS, kernel
from lm.kernels.disk_cache import KernelCache

original = KernelCache.save_overload
def slowly(self, sig, data):
    time.sleep(0.5)  # the other process needs the kernel meanwhile
    original(self, sig, data)
KernelCache.save_overload = slowly

@kernel
def add_one(number):
    return number + 1

@kernel
def add_two(number):
    return number + 2

print("ready", flush=True)
sys.stdin.readline()
assert add_one(1) == add_two(0)
print(sum(sum(kernel.stats.cache_misses.values()) for kernel in KERNELS))
"""


@pytest.mark.slow
def test_one_of_two_processes_compiles_a_kernel_and_the_other_waits(tmp_path: Path) -> None:
    (tmp_path / "slowly.py").write_text(COMPILE_SLOWLY)
    command, pipe = [sys.executable, str(tmp_path / "slowly.py")], subprocess.PIPE
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PYTHONPATH": str(Path(lm.__file__).parents[1]),
    }
    processes = [subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) for _ in range(2)]
    for process in processes:
        assert process.stdout and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin
        process.stdin.write("\n")
        process.stdin.flush()
    compiled = [int(process.communicate(timeout=300)[0]) for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    alone = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, stdout=pipe, text=True, check=True)
    assert alone.stdout == "ready\n0\n", "all kernels are cached"
    assert len([*(tmp_path / "cache").rglob("*.nbc")]) == 2
    assert sum(compiled) == 2, "a kernel was compiled twice"
