"""Checks grammars of strangers in a process of its own: a hostile one costs its request, not the server.

``python -m lm.inference.grammar_check SPECIAL_TOKENS SECONDS`` answers a grammar with an empty text or with what is
wrong; see :class:`lm.common.processes.ChildProcess`. llguidance limits the size of a grammar, but not always the time
or the memory that it takes. A timer of the operating system ends the process, whatever it is doing.
"""

import contextlib
import json
import random
import signal
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict
from importlib import import_module
from typing import Any

from lm.common.errors import UserError
from lm.common.processes import ChildEnded, ChildProcess, serve_parent
from lm.inference.grammars import END, SPECIAL_MARK, Grammar, name_special, require_llguidance

_MAX_MEMORY_BYTES = 2 << 30  # of the process's address space
_NUM_STEPS = 64
_MAX_STEPS_SECONDS = 0.2  # of the CPU, for all of them; a batch of generations waits meanwhile


class GrammarCheck:
    """Raises UserError for a grammar that does not compile within ``seconds``, or whose masks take too long.

    ``special_tokens`` are those that a grammar may name. One thread at a time may call it. The process is started by
    the first call, and by one after it was ended.
    """

    def __init__(self, special_tokens: Collection[str] = (), seconds: float = 1.0) -> None:
        self._arguments = json.dumps([*special_tokens]), str(seconds)
        self._process: ChildProcess | None = None

    def __call__(self, grammar: Grammar) -> None:
        """Check a grammar."""
        require_llguidance()
        if not (self._process and self._process.is_running):
            self._process = ChildProcess(__spec__.name, *self._arguments)
        try:
            problem = self._process.ask(json.dumps(asdict(grammar)).encode()).decode()
        except ChildEnded:
            problem = f"The {grammar.subject} is too complex: it takes too long or too much memory to compile."
        if problem:
            raise UserError(problem)


class _Bytes:
    """A vocabulary of the 256 bytes and some special tokens, for llguidance. It is made faster than that of a model."""

    bos_token_id, is_tokenizer_wrapper = None, True

    def __init__(self, special_tokens: Sequence[str]) -> None:
        names = [END, *map(name_special, special_tokens)]
        specials = [SPECIAL_MARK + name.encode() for name in names]
        self.tokens = [*(bytes([byte]) for byte in range(256)), *specials]
        self.eos_token_id, self.special_token_ids = 256, list(range(256, len(self.tokens)))

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


def _find_problem(grammar: Grammar, tokenizer: Any) -> str:
    """Return what is wrong, or an empty text, after some steps of a random text."""
    try:
        matcher = grammar.compile(tokenizer)
    except UserError as error:
        return str(error)
    choose = random.Random(0).choice
    started = time.thread_time()
    for _ in range(_NUM_STEPS):
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        if time.thread_time() - started > _MAX_STEPS_SECONDS:
            return f"The {grammar.subject} is too complex: to find the tokens that fit takes too long."
        if matcher.is_error():
            reason = matcher.get_error().partition("\n")[0]
            return str(grammar.explain("no text fits it" if "NoExtension" in reason else reason))
        allowed = [byte for byte in range(256) if bits >> byte & 1]
        if not allowed:
            break
        matcher.consume_token(choose(allowed))
    return ""


def main(special_tokens: str, seconds: str) -> None:
    """Answer grammars until the input ends."""
    requests, send_answer = serve_parent()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    with contextlib.suppress(ImportError, ValueError, OSError):  # not on every system
        resource = import_module("resource")
        resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    tokenizer = require_llguidance().LLTokenizer(_Bytes(json.loads(special_tokens)))
    for message in requests:
        grammar = Grammar(**json.loads(message))
        signal.setitimer(signal.ITIMER_REAL, float(seconds))
        problem = _find_problem(grammar, tokenizer)
        signal.setitimer(signal.ITIMER_REAL, 0)
        send_answer(problem.encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
