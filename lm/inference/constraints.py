"""Constraints of structured output: which token ids may come next, so that the whole text fits a grammar.

A constraint is a state of llguidance's parser. It gives a mask of the ids that keep the text possible, and each new id
advances it. Source: Koo et al. 2024 (automata over a tokenizer's vocabulary).
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Collection
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from lm.common.errors import UserError
from lm.inference.grammar_check import GrammarCheck
from lm.inference.grammars import END, SPECIAL_MARK, Grammar, name_special, require_llguidance
from lm.tokenizer.text_tokenizer import TextTokenizer

_MAX_MASK_SECONDS = 1.0  # of the CPU; the whole batch waits meanwhile
_MAX_CACHED_LENGTH = 1 << 19  # characters of compiled grammars; each takes some 150 bytes of memory
_CONSTRAINT_LENGTH = 1 << 12  # characters that take the memory of the smallest constraint

_views: WeakKeyDictionary[TextTokenizer, Any] = WeakKeyDictionary()  # an LLTokenizer for each tokenizer in use


class ConstraintError(UserError):
    """A text cannot go on: the constraint takes too long or too much memory here, or no token fits."""


class _Vocabulary:
    """A tokenizer as llguidance reads it. The end of the text is the id ``size``.

    No real id is the end, so generations with different stop ids share it.
    """

    bos_token_id, is_tokenizer_wrapper = None, True

    def __init__(self, tokenizer: TextTokenizer) -> None:
        specials = {token_id: name_special(name).encode() for name, token_id in tokenizer.special_ids.items()}
        specials[tokenizer.size] = END.encode()
        vocab = tokenizer.vocab
        self.tokens = [
            SPECIAL_MARK + specials[token_id] if token_id in specials else vocab.get(token_id, b"")
            for token_id in range(tokenizer.size + 1)
        ]
        self.special_token_ids, self.eos_token_id = list(specials), tokenizer.size

    def __call__(self, text: str) -> list[int]:
        """Encode a text. llguidance requires it for tokens that it forces, which :class:`Grammar` turns off."""
        raise NotImplementedError


class Constraint:
    """The state of a grammar after the ids so far. One generation owns it; :meth:`copy` makes one for another.

    Errors end the text at the next :meth:`advance`, so that they cost the generation and not its batch.
    """

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size
        self._problem = ""

    def copy(self) -> "Constraint":
        """Return an independent constraint in the same state."""
        return Constraint(self._matcher.deep_copy(), self._vocab_size)

    def mask(self, end_ids: Collection[int] = ()) -> npt.NDArray[np.bool_]:
        """Return which ids may come next, bool (V,). The state stays the same.

        The ``end_ids`` may come if the text fits the grammar as it is, whatever their bytes are. If no id fits, or if
        llguidance fails, all others are True, and :meth:`advance` raises the error.
        """
        started = time.thread_time()
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if time.thread_time() - started > _MAX_MASK_SECONDS:
            self._problem = "it takes too long to find the tokens that fit"
        mask = np.unpackbits(bits, bitorder="little", count=self._vocab_size + 1).view(np.bool_)
        can_end, mask = mask[-1], mask[:-1]
        if end_ids:
            mask[list(end_ids)] = can_end
        if self._matcher.is_error():
            self._problem = "the text so far became too complex, or no token fits"
        elif not mask.any() and not can_end:
            self._problem = "no token fits"
        if self._problem:
            mask[:] = True
            mask[list(end_ids)] = False
        elif not mask.any():  # complete, and there is no id that ends the text
            mask[:] = True
        return mask

    def advance(self, token_id: int) -> None:
        """Add an id to the text, one of the mask but no end id. Raises ConstraintError if the text cannot go on."""
        if self._problem or not self._matcher.consume_token(token_id):
            raise ConstraintError(f"The constraint of the answer failed: {self._problem or 'a token does not fit'}.")

    @property
    def is_complete(self) -> bool:
        """Whether the text fits the grammar, and no id can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()


class ConstraintCompiler:
    """Makes constraints for a tokenizer. Threads may share it; they take turns.

    A grammar is first compiled in a process with bounded time and memory, see
    :class:`lm.inference.grammar_check.GrammarCheck`. Recent ones are kept.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._check = GrammarCheck(tokenizer.special_ids)
        self._lock = threading.Lock()
        self._recent: OrderedDict[Grammar, Constraint] = OrderedDict()

    def compile(self, grammar: Grammar) -> Constraint:
        """Return a constraint at the start of a text.

        Raises UserError for a grammar that llguidance cannot read or that takes too long, and without llguidance.
        """
        with self._lock:
            if grammar not in self._recent:
                self._check(grammar)
                if self._tokenizer not in _views:
                    _views[self._tokenizer] = require_llguidance().LLTokenizer(_Vocabulary(self._tokenizer))
                self._recent[grammar] = Constraint(grammar.compile(_views[self._tokenizer]), self._tokenizer.size)
                while sum(len(recent.source) + _CONSTRAINT_LENGTH for recent in self._recent) > _MAX_CACHED_LENGTH:
                    self._recent.popitem(last=False)
            self._recent.move_to_end(grammar)
            return self._recent[grammar].copy()
