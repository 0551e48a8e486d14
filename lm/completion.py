"""Text out of a model and a tokenizer: what a user's words go on with."""

import codecs
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from lm.errors import UserError
from lm.generate import Generation, generate, stream
from lm.model import TransformerLM
from lm.pretokens import END_OF_TEXT
from lm.sampling import SampleConfig
from lm.tokenizer import Tokenizer


class Completion(NamedTuple):
    """What a prompt goes on with."""

    prompt: str
    text: str
    tokens: int
    """How many were drawn, those of a stop text included."""


class TextStream:
    """The text of ids as they come: whole characters, up to that of ``stops`` which is complete first.

    What may be the start of a stop text is held back until it is known not to be.
    """

    def __init__(self, token_bytes: Mapping[int, bytes], stops: Sequence[str] = ()) -> None:
        self._token_bytes = token_bytes
        self._stops = [stop for stop in stops if stop]
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped = False
        """Whether a stop text has come."""

    def add(self, token_id: int) -> str:
        """The text that is certain now. No character goes on across an id without bytes, as special ones are."""
        more = self._token_bytes[token_id]
        return self._pass(self._decoder.decode(more, final=not more))

    def finish(self) -> str:
        """The rest, when no more ids come; half a character becomes U+FFFD."""
        rest = self._pass(self._decoder.decode(b"", final=True)) + self._held
        self._held = ""
        return rest

    def _pass(self, more: str) -> str:
        if self.stopped:
            return ""
        text = self._held + more
        if found := [(place + len(stop), place) for stop in self._stops if (place := text.find(stop)) >= 0]:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        longest = max((len(stop) for stop in self._stops), default=0)
        begins = range(max(0, len(text) - longest + 1), len(text))
        held = next((i for i in begins if any(stop.startswith(text[i:]) for stop in self._stops)), len(text))
        self._held = text[held:]
        return text[:held]


def prompt_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The ids of a user's words, in which special tokens are plain text. No words begin a new document, where
    ``<|endoftext|>`` ends them."""
    ids = tokenizer.encode(prompt, allowed_special=())
    if not ids and END_OF_TEXT in tokenizer.special_ids:
        return [tokenizer.special_ids[END_OF_TEXT]]
    return ids


def check_vocabulary(model: TransformerLM, size: int) -> None:
    """Raise UserError unless the model's vocabulary is of ``size`` ids, those of its tokenizer."""
    if model.config.vocab_size != size:
        raise UserError(
            f"The model has a vocabulary of {model.config.vocab_size:,}, the tokenizer {size:,}; "
            "they do not belong together."
        )


def text_generation(
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    config: SampleConfig,
    seed: int,
    on_text: Callable[[str], None],
    wants_logprobs: bool = False,
) -> tuple[Generation, TextStream]:
    """A generation that tells ``on_text``, at each token, of the text that is certain now; the stream has the rest at
    the end. Special tokens and the texts of ``config.stop`` end it."""
    text = TextStream(tokenizer.vocab, config.stop)

    def on_token(token_id: int) -> bool:
        on_text(text.add(token_id))
        return text.stopped

    stop_ids = frozenset(tokenizer.special_ids.values())
    return Generation(prompt, config.max_new_tokens, config, stop_ids, seed, wants_logprobs, on_token), text


def complete(
    model: TransformerLM, tokenizer: Tokenizer, config: SampleConfig, max_batch_size: int = 64
) -> list[Completion]:
    """What the model adds to the prompts, ``config.samples`` times for each, one prompt after the other;
    ``max_batch_size`` are drawn side by side.

    Each ends before a special token or a text of ``config.stop``. Raises UserError when the model and the tokenizer do
    not belong together.
    """
    check_vocabulary(model, tokenizer.size)
    prompts = [prompt for prompt in config.prompts for _ in range(config.samples)]
    pieces: list[list[str]] = [[] for _ in prompts]
    begun = [
        text_generation(tokenizer, prompt_ids(tokenizer, prompt), config, config.seed + number, pieces[number].append)
        for number, prompt in enumerate(prompts)
    ]
    generate(model, [generation for generation, _ in begun], max_batch_size)
    return [
        Completion(prompt, "".join(given) + text.finish(), len(generation.ids))
        for prompt, given, (generation, text) in zip(prompts, pieces, begun, strict=True)
    ]


def stream_text(model: TransformerLM, tokenizer: Tokenizer, prompt: str, config: SampleConfig) -> Iterator[str]:
    """What :func:`complete` gives for one prompt, piece by piece as it comes."""
    check_vocabulary(model, tokenizer.size)
    pieces: list[str] = []
    generation, text = text_generation(tokenizer, prompt_ids(tokenizer, prompt), config, config.seed, pieces.append)
    for _ in stream(model, generation):
        yield from filter(None, pieces)
        pieces.clear()
    yield text.finish()
