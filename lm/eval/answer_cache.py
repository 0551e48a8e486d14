"""A JSON Lines file of a model's answers that only grows: an answer that was paid for is not asked for again."""

import fcntl
import hashlib
import json
import logging
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO

from lm.common.errors import UserError, translate_write_errors
from lm.eval.chat_client import ChatAnswer, ChatRequest

log = logging.getLogger(__name__)


def request_key(model: str, request: ChatRequest, sample: int) -> str:
    """Return the key of an answer: the SHA-256 of the model's name, the request, and the sample's number."""
    given = {name: value for name, value in asdict(request).items() if value is not None}  # a new field keeps old keys
    content = {"model": model, "sample": sample, **given}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class AnswerCache:
    """Answers by :func:`request_key`, in memory and in a file.

    Use it in a ``with``: one process at a time has the file. Damaged lines, such as a last line that a kill cut off,
    are skipped. Raises UserError if another process has the file, or if it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.answers: dict[str, ChatAnswer] = {}

    def __enter__(self) -> "AnswerCache":
        with translate_write_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file: IO[bytes] = self.path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise UserError(f"Another process writes {self.path}; wait for it, or use another --out.") from None
        self._read()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with translate_write_errors(self.path):  # after a failure, this tries to write again
            self._file.close()  # releases the lock

    def add(self, key: str, answer: ChatAnswer) -> None:
        """Keep an answer. When this returns, it survives the process. Raises UserError if it cannot be written."""
        with translate_write_errors(self.path):
            self._file.write(json.dumps({"key": key, **asdict(answer)}, ensure_ascii=False).encode() + b"\n")
            self._file.flush()
        self.answers[key] = answer

    def _read(self) -> None:
        self._file.seek(0)
        damaged, line = 0, b"\n"
        for line in self._file:
            try:
                row = json.loads(line)
                key = row.pop("key")
                self.answers[key] = _check(ChatAnswer(**row))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                damaged += 1
        if not line.endswith(b"\n"):
            self._file.write(b"\n")  # the next line starts after the one that was cut off
        if damaged:
            log.warning("%s: damaged lines are skipped: %d.", self.path, damaged)


def _check(answer: ChatAnswer) -> ChatAnswer:
    counts = (answer.prompt_tokens, answer.completion_tokens)
    if not (isinstance(answer.text, str) and all(isinstance(count, int) and count >= 0 for count in counts)):
        raise TypeError("a field has a wrong type")
    return answer
