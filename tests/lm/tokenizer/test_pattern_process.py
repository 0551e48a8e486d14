"""Long texts with a slow pattern are encoded and counted in processes, with the same result."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.common.errors import InvalidUtf8Error, UserError
from lm.common.processes import ChildProcess
from lm.text.text_windows import WINDOW
from lm.tokenizer.added_tokens import AddedToken
from lm.tokenizer.pattern_process import PatternProcesses, count_job, encode_job
from lm.tokenizer.pretoken_counts import count_files, count_pretokens
from lm.tokenizer.stream import encode_files
from lm.tokenizer.tokenizer import Tokenizer
from tests.helpers.examples import examples
from tests.helpers.limits import wait_for
from tests.helpers.processes import PROJECT
from tests.helpers.tokenizers import CUSTOM_PATTERN, make_tokenizer, stable_text

END = "<|endoftext|>"
DOCUMENT = "It was a café's 1234 stories… 日本語\r\n\n  and 🙂 more.\n" * 40 + END
LONG = DOCUMENT * (2 * WINDOW // len(DOCUMENT) + 1)


def processes_of(tokenizer: Tokenizer) -> list[ChildProcess]:
    return tokenizer._pattern_processes._idle


def test_a_long_text_is_encoded_in_a_process_and_a_short_one_is_not(custom_tokenizer: Tokenizer) -> None:
    tokenizer = Tokenizer(*custom_tokenizer.parts)
    expected = tokenizer.encode_reference(DOCUMENT)
    assert tokenizer.encode(DOCUMENT) == expected
    assert processes_of(tokenizer) == []
    blocks = (LONG.encode()[start : start + 100_001] for start in range(0, len(LONG.encode()), 100_001))
    ids = [int(token) for array in tokenizer.encode_blocks(blocks) for token in array]
    assert ids == expected * (len(LONG) // len(DOCUMENT))
    [process] = processes_of(tokenizer)
    assert tokenizer.encode(LONG) == ids
    assert processes_of(tokenizer) == [process]


def test_all_options_of_a_tokenizer_reach_the_process() -> None:
    plain = make_tokenizer()
    vocab = {**plain.vocab, 5000: b"stories", 70_000: b"<think>"}
    tokenizer = Tokenizer(
        vocab,
        plain.merges,
        [END],
        (r"\d", r"\w+|\W+"),
        ignore_merges=True,
        added_tokens=[AddedToken("<think>", special=False)],
    )
    expected = tokenizer.encode_reference(DOCUMENT + "<think>")
    assert {5000, 70_000} <= set(expected)
    times = len(LONG) // len(DOCUMENT)
    assert tokenizer.encode((DOCUMENT + "<think>") * times) == expected * times
    assert processes_of(tokenizer)


@examples(50)
@given(st.lists(st.sampled_from([END, "<|end", " ", "\n", "12", "日本"]) | stable_text, max_size=8).map("".join))
def test_a_process_answers_like_the_function(process_pair: tuple[Any, ...], text: str) -> None:
    tokenizer, encoder, counter = process_pair
    assert np.frombuffer(encoder.ask(text.encode()), np.uint32).tolist() == tokenizer.encode_reference(text)
    [table] = count_pretokens([[text.encode()]], [END], CUSTOM_PATTERN)
    expected = {row["pretoken"].decode(): row["count"] for row in table.to_pylist()}
    assert json.loads(counter.ask(text.encode())) == expected


@pytest.fixture(scope="module")
def process_pair(custom_tokenizer: Tokenizer) -> Iterator[tuple[Any, ...]]:
    encoders = PatternProcesses(lambda: encode_job(custom_tokenizer.parts))
    counters = PatternProcesses(lambda: count_job([END], CUSTOM_PATTERN))
    with encoders.borrow() as encoder, counters.borrow() as counter:
        yield custom_tokenizer, encoder, counter


@pytest.mark.slow
def test_counts_of_long_texts(tmp_path: Path) -> None:
    [short] = count_pretokens([[DOCUMENT.encode()]], [END], CUSTOM_PATTERN)
    paths = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for path in paths:
        path.write_text(LONG, encoding="utf-8")
    table = count_files(paths, [END], CUSTOM_PATTERN, threads=2)
    times = 2 * (len(LONG) // len(DOCUMENT))
    expected = Counter({row["pretoken"]: times * row["count"] for row in short.to_pylist()})
    assert Counter({row["pretoken"]: row["count"] for row in table.to_pylist()}) == expected


@pytest.mark.slow
def test_files_are_encoded_in_two_processes(custom_tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer = Tokenizer(*custom_tokenizer.parts)
    paths = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for path in paths:
        path.write_text(LONG, encoding="utf-8")
    files = encode_files(paths, tokenizer, tmp_path / "ids", threads=2)
    expected = tokenizer.encode_reference(DOCUMENT) * (2 * (len(LONG) // len(DOCUMENT)))
    assert b"".join(file.read_bytes() for file in files) == b"".join(i.to_bytes(2, "little") for i in expected)


def test_invalid_text_ends_the_process(custom_tokenizer: Tokenizer) -> None:
    tokenizer = Tokenizer(*custom_tokenizer.parts)
    with pytest.raises(InvalidUtf8Error):
        list(tokenizer.encode_blocks([LONG.encode(), b"\xff"]))
    assert processes_of(tokenizer) == []
    assert tokenizer.encode(LONG)


def test_a_killed_process_is_named(custom_tokenizer: Tokenizer) -> None:
    processes = PatternProcesses(lambda: encode_job(custom_tokenizer.parts))
    with pytest.raises(UserError, match=r"ended with code -9.*fewer threads"), processes.borrow() as process:
        process.process.kill()
        process.process.wait()
        process.ask(DOCUMENT.encode())


def test_processes_end_with_their_owner(custom_tokenizer: Tokenizer) -> None:
    processes = PatternProcesses(lambda: count_job([], r"\S+"))
    with processes.borrow() as process:
        assert process.ask(b"a b a") == b'{"a": 2, " ": 2, "b": 1}'
    child = process.process
    del process, processes
    assert child.wait(10) == -9


PARENT = """
from lm.tokenizer.pattern_process import PatternProcesses, count_job
with PatternProcesses(lambda: count_job([], r"(a|aa)+$")).borrow() as process:
    print(process.process.pid, flush=True)
    process.ask(b"a" * 40 + b"b")  # takes very long
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="needs /proc")
def test_a_process_does_not_outlive_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=PROJECT, stdout=subprocess.PIPE)
    assert parent.stdout
    child = int(parent.stdout.readline())
    time.sleep(1)
    assert Path(f"/proc/{child}").exists()
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    wait_for(lambda: not Path(f"/proc/{child}").exists(), 20, "end of the process")


def test_the_process_imports_what_its_parent_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lm").mkdir()
    (tmp_path / "lm" / "__init__.py").write_text("raise ImportError('another package')")
    monkeypatch.chdir(tmp_path)
    with PatternProcesses(lambda: count_job([], r"\S+")).borrow() as process:
        assert process.ask(b"a") == b'{"a": 1}'
