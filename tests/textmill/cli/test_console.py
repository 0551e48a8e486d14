"""The streams of a command: closed, full, or of another encoding."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lm.text.demo_corpus import demo_stories
from tests.helpers.corpora import write_text
from tests.helpers.deployed import TEXTMILL
from textmill.cli.main import prepare_streams


@pytest.mark.slow
def test_a_reader_that_has_read_enough_is_no_error(tmp_path: Path) -> None:
    for number in range(2000):  # more lines than a pipe holds
        (tmp_path / f"a-file-that-no-run-makes-{number}").touch()
    process = subprocess.Popen(
        [*TEXTMILL, "verify", "--root", tmp_path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout and process.stderr and process.stdout.readline()
    process.stdout.close()
    assert (process.stderr.read(), process.wait()) == ("", 141)


@pytest.mark.slow
def test_a_closed_output_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "a-file-that-no-run-makes").touch()
    command = ["sh", "-c", 'exec "$@" >&-', "sh", *TEXTMILL, "verify", "--root", str(tmp_path)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_an_output_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "a-file-that-no-run-makes").touch()
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*TEXTMILL, "verify", "--root", tmp_path], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    message = "textmill: The output cannot be written: No space left on device.\n"
    assert (done.stderr, done.returncode) == (message, 2)


@pytest.mark.slow
@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-"])
def test_messages_that_cannot_be_written_do_not_end_a_command(redirection: str, tmp_path: Path) -> None:
    script = f'exec "$@" {redirection}'
    text = write_text(tmp_path / "text.txt", "".join(demo_stories(300)))
    plan = ["plan", "--data.train", str(text), "--root", str(tmp_path), "--budget", "2h", "--train.steps", "99"]
    for arguments, code in ((plan, 0), (["rum"], 2)):
        done = subprocess.run(["sh", "-c", script, "sh", *TEXTMILL, *arguments], stdout=subprocess.PIPE, check=False)
        assert done.returncode == code
        assert b"ingest" in done.stdout if code == 0 else not done.stdout


@pytest.mark.slow
def test_an_output_that_is_not_utf8_has_escapes(tmp_path: Path) -> None:
    (tmp_path / "café").touch()
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [*TEXTMILL, "verify", "--root", tmp_path], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert r"caf\xe9" in done.stdout


def test_a_closed_input_has_no_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    prepare_streams()
    with pytest.raises(EOFError), sys.stdin:
        input()
