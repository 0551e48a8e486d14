"""Patterns without a compiled scanner, in processes: ``regex`` holds Python's lock, so threads would take turns.

``python -m lm.tokenizer.pattern_process`` reads a job, then pieces of text, and answers each piece; see
:class:`lm.common.processes.ChildProcess`.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import numpy as np

from lm.common.errors import UserError
from lm.common.processes import ChildEnded, ChildProcess, serve_parent
from lm.text.pretokenize import Pattern, pretokenize, split_special_tokens
from lm.text.text_windows import WINDOW
from lm.tokenizer.formats.tokenizer_config import TokenizerParts, format_config, parse_config
from lm.tokenizer.reference import PlainEncoder

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


class PatternProcesses:
    """The processes of a job: as many as threads use at the same time, kept for the next use. Thread-safe."""

    def __init__(self, make_job: Callable[[], Mapping[str, Any]]) -> None:
        self._make_job = make_job
        self._idle: list[ChildProcess] = []  # append and pop of a list are thread-safe

    @contextmanager
    def borrow(self) -> Iterator[ChildProcess]:
        """Lend a process. It ends if its use does not come to a normal end. Raises UserError if it has ended."""
        try:
            process, is_new = self._idle.pop(), False
        except IndexError:
            process, is_new = ChildProcess(__spec__.name), True
        try:
            if is_new:
                process.send(json.dumps(self._make_job()).encode())
            yield process
        except ChildEnded as error:
            raise UserError(
                f"The process that finds pretokens by the pattern ended with code {error.code}; "
                "its message is above. -9 often means that the memory was full: use fewer threads."
            ) from None
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
                yield read(process.ask(piece.encode()))
            length += len(piece)


def _make_work(job: Mapping[str, Any]) -> Callable[[str], bytes]:
    """Return the function that answers a piece of text."""
    if "vocab" not in job:
        special_tokens, pattern = job["special_tokens"], job["pattern"]
        pattern = pattern if isinstance(pattern, str) else tuple(pattern)
        return lambda text: json.dumps(count_pieces(text, special_tokens, pattern)).encode()
    vocab = {int(token_id): token.encode("latin-1") for token_id, token in job["vocab"].items()}
    merges = [(left.encode("latin-1"), right.encode("latin-1")) for left, right in job["merges"]]
    encoder = PlainEncoder(parse_config(job)._replace(vocab=vocab, merges=merges))
    return lambda text: np.array(encoder.encode(text), np.uint32).tobytes()


def main() -> None:
    """Answer pieces of text until the input ends."""
    messages, answer = serve_parent()
    work = _make_work(json.loads(next(messages)))
    for text in messages:
        answer(work(text.decode()))


if __name__ == "__main__":
    main()
