"""Patterns without a compiled scanner, in processes: ``regex`` holds Python's lock, so threads would take turns.

``python -m lm.tokenizer.pattern_process`` reads a job, then pieces of text, and answers each piece. A message is its
length (8 bytes) and its bytes. The process ends with its input, even in the middle of a piece, so it does not outlive
its parent.
"""

import json
import os
import struct
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from queue import SimpleQueue
from typing import IO, Any, TypeVar, cast

import numpy as np

from lm.common.errors import UserError
from lm.common.processes import start_child
from lm.text.pretokenize import Pattern, pretokenize, split_special_tokens
from lm.text.windows import WINDOW
from lm.tokenizer.formats.tokenizer_config import format_config, parse_config
from lm.tokenizer.parts import TokenizerParts

_LENGTH = struct.Struct("<q")

Result = TypeVar("Result")


def count_pieces(text: str, special_tokens: Sequence[str], pattern: Pattern) -> Counter[str]:
    """Return the counts of the pretokens of ``text``. Special tokens are not counted."""
    counts: Counter[str] = Counter()
    for part, is_special in split_special_tokens(text, special_tokens):
        if not is_special:
            counts.update(pretokenize(part, pattern))
    return counts


def count_job(special_tokens: Sequence[str], pattern: Pattern) -> dict[str, Any]:
    """Return the job of :func:`count_pieces`. Each answer is a JSON object of counts."""
    return {"special_tokens": special_tokens, "pattern": pattern}


def encode_job(parts: TokenizerParts) -> dict[str, Any]:
    """Return the job of a tokenizer. Each answer is the ids of a piece, uint32."""
    vocab = {token_id: token.decode("latin-1") for token_id, token in parts.vocab.items()}
    merges = [(left.decode("latin-1"), right.decode("latin-1")) for left, right in parts.merges]
    return {"vocab": vocab, "merges": merges, **format_config(parts)}


class PatternProcess:
    """A process that does one job on pieces of text. One thread at a time may use it."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        self._process = start_child(__spec__.name)
        self.close: Callable[[], None] = weakref.finalize(self, _end, self._process)
        """End the process. This also happens when nothing refers to the object any more."""
        self._send(json.dumps(job).encode())

    def __call__(self, text: str) -> bytes:
        """Return the answer for a piece of text. Raises UserError if the process has ended."""
        self._send(text.encode())
        answer = _read_message(cast(IO[bytes], self._process.stdout))
        if answer is None:
            raise self._has_ended()
        return answer

    def _send(self, message: bytes) -> None:
        try:
            _write_message(cast(IO[bytes], self._process.stdin), message)
        except BrokenPipeError:
            raise self._has_ended() from None

    def _has_ended(self) -> UserError:
        return UserError(
            f"The process that finds pretokens by the pattern ended with code {self._process.wait()}; "
            "its message is above. -9 often means that the memory was full: use fewer threads."
        )


class PatternProcesses:
    """The processes of a job: as many as threads use at the same time, kept for the next use. Thread-safe."""

    def __init__(self, make_job: Callable[[], Mapping[str, Any]]) -> None:
        self._make_job = make_job
        self._idle: list[PatternProcess] = []  # append and pop of a list are thread-safe

    @contextmanager
    def borrow(self) -> Iterator[PatternProcess]:
        """Lend a process. It ends if its use does not come to a normal end."""
        try:
            process = self._idle.pop()
        except IndexError:
            process = PatternProcess(self._make_job())
        try:
            yield process
        except BaseException:
            process.close()
            raise
        self._idle.append(process)


def map_pieces(
    pieces: Iterable[str], work: Callable[[str], Result], processes: PatternProcesses, read: Callable[[bytes], Result]
) -> Iterator[Result]:
    """Yield ``work(piece)`` for pieces of the first :data:`WINDOW` characters, then the same from a process, by way of
    ``read``. So a short text starts no process."""
    length = 0
    with ExitStack() as stack:
        process = None
        for piece in pieces:
            if length < WINDOW:
                yield work(piece)
            else:
                process = process or stack.enter_context(processes.borrow())
                yield read(process(piece))
            length += len(piece)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        with suppress(BrokenPipeError):  # it ended before it read all
            cast(IO[bytes], pipe).close()
    process.wait()


def _write_message(pipe: IO[bytes], message: bytes) -> None:
    pipe.write(_LENGTH.pack(len(message)))
    pipe.write(message)
    pipe.flush()


def _read_message(pipe: IO[bytes]) -> bytes | None:
    """Return the next message, or None at the end of the pipe."""
    length = pipe.read(_LENGTH.size)
    if len(length) < _LENGTH.size:
        return None
    message = pipe.read(_LENGTH.unpack(length)[0])
    return message if len(message) == _LENGTH.unpack(length)[0] else None


def _make_work(job: Mapping[str, Any]) -> Callable[[str], bytes]:
    """Return the function that answers a piece of text."""
    if "vocab" not in job:
        special_tokens, pattern = job["special_tokens"], job["pattern"]
        pattern = pattern if isinstance(pattern, str) else tuple(pattern)
        return lambda text: json.dumps(count_pieces(text, special_tokens, pattern)).encode()
    from lm.tokenizer.tokenizer import Tokenizer

    vocab = {int(token_id): token.encode("latin-1") for token_id, token in job["vocab"].items()}
    merges = [(left.encode("latin-1"), right.encode("latin-1")) for left, right in job["merges"]]
    tokenizer = Tokenizer(*parse_config(job)._replace(vocab=vocab, merges=merges))
    return lambda text: np.array(tokenizer.encode_reference(text), np.uint32).tobytes()


def main() -> None:
    """Answer pieces of text until the input ends."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints goes to the log
    messages: SimpleQueue[bytes] = SimpleQueue()

    def read() -> None:
        while (message := _read_message(sys.stdin.buffer)) is not None:
            messages.put(message)
        os._exit(0)  # the parent has ended, or does not wait for the answer

    threading.Thread(target=read, daemon=True).start()
    work = _make_work(json.loads(messages.get()))
    while True:
        _write_message(output, work(messages.get().decode()))


if __name__ == "__main__":
    main()
