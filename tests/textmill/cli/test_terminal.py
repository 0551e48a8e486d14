"""Messages and log lines: wrapped and coloured in a terminal, plain in a pipe."""

import io
import logging
import pty
import sys
from collections.abc import Iterator
from typing import TextIO

import pytest

from textmill.cli.terminal import LogFormatter, print_message, wrap

LONG = "word " * 20 + "a/path/" * 14


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[TextIO]:
    """A terminal in place of stderr. Its size is unknown, as that of some consoles: it counts as 80 columns."""
    _, name = pty.openpty()
    with open(name, "w", encoding="utf-8") as stream:
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.delenv("NO_COLOR", raising=False)
        yield stream


def log_line(level: int, message: str) -> str:
    return LogFormatter().format(logging.LogRecord("lm", level, "", 0, message, (), None))


def test_a_terminal_gets_lines_that_end_between_words(terminal: TextIO) -> None:
    *lines, path = wrap(LONG, terminal, "  ").split("\n")
    assert len(lines) == 2 and all(len(line) <= 80 for line in lines)
    assert path == "  " + "a/path/" * 14, "a path stays whole"
    assert lines[1].startswith("  word")


def test_a_pipe_gets_the_text_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.StringIO()
    assert wrap(LONG, pipe, "  ") == LONG
    monkeypatch.setattr(sys, "stderr", pipe)
    print_message(f"textmill: {LONG}", is_error=True)
    assert pipe.getvalue() == f"textmill: {LONG}\n"
    assert log_line(logging.WARNING, LONG)[8:] == f"  {LONG}"


def test_colours_need_a_terminal_that_shows_them(terminal: TextIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal)
    assert log_line(logging.WARNING, "careful").endswith("\x1b[33m  careful\x1b[0m")
    assert log_line(logging.INFO, "step 1").startswith("\r\x1b[K\x1b[2m")
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as context:
            context.setenv(name, value)
            assert log_line(logging.WARNING, "careful").endswith("  careful")
            assert ("\x1b" in log_line(logging.INFO, "step 1")) == (name == "NO_COLOR"), "only a line is erased"
