"""Completion of text prompts by a model and its tokenizer."""

import codecs
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from lm.common.errors import UserError
from lm.hardware.device import explain_out_of_memory
from lm.inference.config import SampleConfig
from lm.inference.constraints import Constraint
from lm.inference.engine import generate, stream
from lm.inference.generation_request import Generation
from lm.inference.sampler import LogitEdits
from lm.model.transformer import TransformerLM
from lm.text.pretokenize import END_OF_TEXT
from lm.tokenizer.text_tokenizer import TextTokenizer
from lm.tokenizer.tokenizer import Tokenizer

OUT_OF_MEMORY = (
    "The model's KV cache does not fit into memory; lower the maximum of new tokens, or the number of samples."
)


class TextStream:
    """Decodes ids one by one into whole characters, up to the first of ``stops``. Holds back possible starts of one.

    A stop that is complete before ``min_tokens`` ids is text like any other.
    """

    def __init__(self, token_bytes: Mapping[int, bytes], stops: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._token_bytes, self._num_missing = token_bytes, min_tokens
        self._stops = [stop for stop in stops if stop]
        self._max_stop_length = max(map(len, self._stops), default=0)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held_back = ""
        self.stop_text: str | None = None
        """The first of ``stops`` in the text, once it is there."""

    @property
    def is_stopped(self) -> bool:
        """Whether the text has ended."""
        return self.stop_text is not None

    def add(self, token_id: int) -> str:
        """Return the text that is final now. An id without bytes, such as a special one or one that the vocabulary
        leaves out, ends a partial character."""
        token = self._token_bytes.get(token_id, b"")
        self._num_missing -= 1
        return self._release(self._decoder.decode(token, final=not token))

    def finish(self) -> str:
        """Return the rest, after the last id. A partial character becomes U+FFFD."""
        rest = self._release(self._decoder.decode(b"", final=True)) + self._held_back
        self._held_back = ""
        return rest

    def _release(self, new_text: str) -> str:
        if self.is_stopped:
            return ""
        text, num_held_back = self._held_back + new_text, len(self._held_back)
        if self._num_missing <= 0:
            finds = [(text.find(stop, max(0, num_held_back + 1 - len(stop))), stop) for stop in self._stops]
            if matches := [(start + len(stop), start, stop) for start, stop in finds if start >= 0]:
                _, start, self.stop_text = min(matches)
                self._held_back = ""
                return text[:start]
        starts = range(max(0, len(text) - self._max_stop_length + 1), len(text))
        end = next((i for i in starts if any(stop.startswith(text[i:]) for stop in self._stops)), len(text))
        self._held_back = text[end:]
        return text[:end]


def encode_prompt(
    tokenizer: TextTokenizer, prompt: str, *, has_begin: bool = True, parses_special: bool = False
) -> list[int]:
    """Return the ids of a user's prompt; special tokens in it are plain text, unless it ``parses_special``.

    If it ``has_begin``, they begin with the token that the model has seen before each text, if the tokenizer names one,
    as Llama's do. Without one, an empty prompt becomes ``<|endoftext|>``, if the tokenizer has it: the model starts a
    new document. Raises UserError for special tokens in a prompt of a SentencePiece tokenizer.
    """
    ids = encode_text(tokenizer, prompt, parses_special)
    if tokenizer.begin_token and has_begin:
        return [tokenizer.special_ids[tokenizer.begin_token], *ids]
    if not ids and END_OF_TEXT in tokenizer.special_ids:
        return [tokenizer.special_ids[END_OF_TEXT]]
    return ids


def encode_text(tokenizer: TextTokenizer, text: str, parses_special: bool) -> list[int]:
    """Return the ids of a user's text; see :func:`encode_prompt`."""
    if not parses_special:
        return tokenizer.encode(text, allowed_special=())
    if not isinstance(tokenizer, Tokenizer):
        raise UserError("The special tokens of a SentencePiece tokenizer cannot be written as text.")
    return tokenizer.encode(text)


def check_vocabulary(model: TransformerLM, vocab_size: int) -> None:
    """Raise UserError unless the model has ``vocab_size`` ids, the number of its tokenizer."""
    if model.config.vocab_size != vocab_size:
        raise UserError(
            f"The model has a vocabulary of {model.config.vocab_size:,}, the tokenizer {vocab_size:,}; "
            "they do not belong together."
        )


class TextGeneration:
    """A generation, to be submitted to an engine, that calls ``on_text`` with each new piece of text, or collects them.

    Text that may be a part of a character or of a stop text is held back until the next tokens decide. The generation
    ends at one of the tokenizer's ``stop_ids`` or at a text in ``config.stop``. ``shown_ids`` are special tokens that
    are text and end nothing.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        prompt: Sequence[int],
        config: SampleConfig,
        seed: int,
        on_text: Callable[[str], None] | None = None,
        edits: LogitEdits | None = None,
        constraint: Constraint | None = None,
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.pieces: list[str] = []
        self._on_text = on_text or self.pieces.append
        edits, limit, stop_ids = edits or LogitEdits(), config.max_new_tokens, tokenizer.stop_ids - shown_ids
        self._stream = TextStream(tokenizer.vocab, config.stop, edits.min_tokens)
        self._hidden_ids = frozenset(tokenizer.special_ids.values()) - shown_ids
        self.generation = Generation(prompt, limit, config, stop_ids, seed, edits, constraint, on_token=self._on_token)

    def _on_token(self, token_id: int) -> bool:
        is_hidden = token_id in self._hidden_ids  # a special token that ends nothing is no text
        self._on_text(self._stream.add(-1 if is_hidden else token_id))
        return self._stream.is_stopped

    @property
    def stop_text(self) -> str | None:
        """The text of ``config.stop`` that ended the generation, if one did."""
        return self._stream.stop_text

    def finish(self) -> str:
        """Return the collected pieces and the text that is held back at the end."""
        return "".join(self.pieces) + self._stream.finish()


class Completion(NamedTuple):
    """The text that a model adds to a prompt."""

    prompt: str
    text: str
    num_tokens: int
    """Tokens sampled, including those of a stop text."""
    num_draft_tokens: int = 0
    """Draft tokens of speculative decoding."""
    num_accepted_tokens: int = 0
    """Draft tokens that were sampled."""


def complete(
    model: TransformerLM, tokenizer: TextTokenizer, config: SampleConfig, max_batch_size: int = 64
) -> list[Completion]:
    """Complete each of ``config.prompts`` ``config.samples`` times, ``max_batch_size`` samples at once.

    Each completion ends before a special token or a text of ``config.stop``. Raises UserError if the model and the
    tokenizer do not belong together.
    """
    check_vocabulary(model, tokenizer.size)
    prompts = [prompt for prompt in config.prompts for _ in range(config.samples)]
    texts = [
        TextGeneration(tokenizer, encode_prompt(tokenizer, prompt), config, config.seed + index)
        for index, prompt in enumerate(prompts)
    ]
    with explain_out_of_memory(OUT_OF_MEMORY):
        generate(model, [text.generation for text in texts], max_batch_size)
    return [
        Completion(
            prompt,
            text.finish(),
            len(text.generation.ids),
            text.generation.num_draft_tokens,
            text.generation.num_accepted_tokens,
        )
        for prompt, text in zip(prompts, texts, strict=True)
    ]


def stream_text(
    model: TransformerLM, tokenizer: TextTokenizer, prompt: str | Sequence[int], config: SampleConfig
) -> Iterator[str]:
    """Yield the text of :func:`complete` for one prompt, text or ids, piece by piece."""
    check_vocabulary(model, tokenizer.size)
    ids = encode_prompt(tokenizer, prompt) if isinstance(prompt, str) else prompt
    text = TextGeneration(tokenizer, ids, config, config.seed)
    with explain_out_of_memory(OUT_OF_MEMORY):
        for _ in stream(model, text.generation):
            yield from filter(None, text.pieces)
            text.pieces.clear()
    yield text.finish()
