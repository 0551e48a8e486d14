"""A command in a terminal of 80 × 24 characters, typed at like a person does."""

import os
import pty
import re
import select
import signal
import struct
import time
from codecs import getincrementaldecoder
from collections.abc import Sequence
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ

from tests.helpers.limits import TIMEOUT_SCALE

_ERASE_LINE = "\x1b[K"
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07]*\x07|[()][0-9A-B])")


class Terminal:
    """A command that runs in a terminal of its own. A context manager, which kills a command that still runs."""

    def __init__(self, command: Sequence[str], folder: Path, environment: dict[str, str]) -> None:
        self.output = ""
        """All that the command wrote, with its escape sequences."""
        self.returncode: int | None = None
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self.process_id, self._file = pty.fork()
        if self.process_id == 0:
            try:
                os.chdir(folder)
                os.execvpe(command[0], [*command], environment)
            finally:
                os._exit(127)
        ioctl(self._file, TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *error: object) -> None:
        if self.returncode is None:
            os.killpg(self.process_id, signal.SIGKILL)
            os.waitpid(self.process_id, 0)
        os.close(self._file)

    def type(self, text: str) -> None:
        """Write to the command's terminal. ``\\x03`` is Ctrl-C."""
        os.write(self._file, text.encode())

    def wait_for(self, pattern: str, seconds: float) -> re.Match[str]:
        """Read until the output matches a regular expression, and return the match. Fail after ``seconds`` times
        TIMEOUT_SCALE, or if the command ends."""
        limit = time.monotonic() + seconds * TIMEOUT_SCALE
        while not (match := re.search(pattern, self.output)):
            assert self._read(limit), f"the command ended without {pattern!r}:\n{self.output}"
        return match

    def answer(self, pattern: str, text: str) -> None:
        """Type a text when the output matches a regular expression."""
        self.wait_for(pattern, 600)
        self.type(text)

    def wait(self, seconds: float) -> int:
        """Read to the end, and return the exit code. Fail after ``seconds`` times TIMEOUT_SCALE."""
        limit = time.monotonic() + seconds * TIMEOUT_SCALE
        while self._read(limit):
            pass
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.process_id, 0)[1])
        return self.returncode

    def _read(self, limit: float) -> bool:
        """Read some output. Return False at its end. Fail at the time ``limit``."""
        ready, _, _ = select.select([self._file], [], [], max(0, limit - time.monotonic()))
        assert ready, f"the command took too long:\n{self.output}"
        try:
            data = os.read(self._file, 1 << 16)
        except OSError:  # so Linux reports the end
            data = b""
        self.output += self._decoder.decode(data)
        return bool(data)


def final_lines(output: str) -> list[str]:
    """Return the lines that a terminal shows at the end: of a line that was overwritten, as by a progress bar, the last
    state."""
    lines = []
    for line in output.replace("\r\n", "\n").split("\n"):
        shown = ""
        for part in line.split("\r"):
            text = _ESCAPE.sub("", part)
            shown = text if part.startswith(_ERASE_LINE) else text + shown[len(text) :]
        lines.append(shown.rstrip())
    return lines
