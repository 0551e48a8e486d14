"""Text in a terminal: wrapped between words, with a little colour. In a pipe or a file it stays as it is."""

import logging
import os
import sys
import textwrap
from contextlib import suppress
from typing import TextIO

_DIM, _RED, _YELLOW = 2, 31, 33  # codes of SGR, "select graphic rendition"


def wrap(text: str, stream: TextIO, indent: str = "") -> str:
    """Break lines between words at the width of a terminal. Lines after a break begin with ``indent``.

    Paths stay whole, to be copied. If ``stream`` is no terminal, the text is unchanged.
    """
    if not stream.isatty():
        return text
    wrapper = textwrap.TextWrapper(
        os.get_terminal_size(stream.fileno()).columns or 80,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(map(wrapper.fill, text.split("\n")))


def print_message(message: str, is_error: bool = False) -> None:
    """Print a message to stderr, unless it cannot be written. The name before that of an error is red."""
    with suppress(OSError):
        name, colon, rest = wrap(message, sys.stderr).partition(":")
        start = color(name + colon, _RED, sys.stderr) if is_error else name + colon
        print(f"{_erase_line(sys.stderr)}{start}{rest}", file=sys.stderr)


class LogFormatter(logging.Formatter):
    """The time and the message of a log line for stderr. In colour, the time is dim and a warning yellow."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, wrapped below the message."""
        time = self.formatTime(record, "%H:%M:%S")
        line = wrap(f"{time}  {super().format(record)}", sys.stderr, " " * (len(time) + 2))
        message = line[len(time) :]
        if record.levelno >= logging.WARNING:
            message = color(message, _YELLOW, sys.stderr)
        return _erase_line(sys.stderr) + color(time, _DIM, sys.stderr) + message


def _knows_escapes(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def _erase_line(stream: TextIO) -> str:
    """Return what erases the line of the cursor, on which a terminal may show a ^C."""
    return "\r\x1b[K" if _knows_escapes(stream) else ""


def color(text: str, code: int, stream: TextIO) -> str:
    """Return a text in a style, if a terminal shows it and the user does not set NO_COLOR."""
    return f"\x1b[{code}m{text}\x1b[0m" if shows_color(stream) else text


def shows_color(stream: TextIO) -> bool:
    """Return whether texts in ``stream`` may have colour."""
    return _knows_escapes(stream) and not os.environ.get("NO_COLOR")
