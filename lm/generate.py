"""Sampling text from a model.

Source: CS336 assignment 1 (section 6); Holtzman et al. 2020 (top-p).
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lm.bounds import FORM, bounded, check_bounds
from lm.errors import UserError
from lm.model import TransformerLM, softmax
from lm.pretokens import END_OF_TEXT
from lm.tokenizer import Tokenizer


@dataclass(frozen=True)
class SampleConfig:
    """How text is sampled."""

    __pydantic_config__ = FORM

    prompts: list[str] = field(default_factory=lambda: ["Once upon a time", "One day", "The little"])
    """Texts to go on from. Special tokens in them are plain text."""
    max_new_tokens: int = bounded(200, ge=0)
    """Most tokens to add to a prompt."""
    temperature: float = bounded(0.8, ge=0, lt=math.inf)
    """Divides the logits: below 1 safer, above 1 wilder, 0 always the likeliest token."""
    top_p: float = bounded(0.95, ge=0, le=1)
    """Samples among the likeliest tokens that together have at least this probability; 1 for all."""
    seed: int = 0
    """Seed of the draws; prompt number i draws with seed + i."""

    def __post_init__(self) -> None:
        check_bounds(self, "sample")


def next_token_probabilities(logits: Tensor, temperature: float, top_p: float) -> Tensor:
    """Probabilities (..., V) to draw the next token from: temperature first, then the top-p nucleus.

    The nucleus is the smallest set of likeliest tokens with at least ``top_p`` probability, never empty.
    Temperature 0 puts everything on the likeliest token.
    """
    if temperature < torch.finfo(torch.float32).tiny:
        return torch.zeros_like(logits).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
    logits = logits.float()
    logits = logits - logits.amax(-1, keepdim=True)  # before a small temperature makes them infinite
    probabilities = softmax(logits / temperature)
    if top_p < 1:
        ordered, order = probabilities.sort(-1, descending=True)
        before = ordered.cumsum(-1) - ordered  # the probability of all likelier tokens
        outside = before >= top_p
        outside[..., 0] = False
        probabilities = torch.zeros_like(probabilities).scatter(-1, order, ordered.masked_fill(outside, 0.0))
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    return probabilities


@torch.inference_mode()
def generate(
    model: TransformerLM,
    prompt: list[int],
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    stop_ids: Collection[int] = (),
    seed: int = 0,
) -> Iterator[int]:
    """Yield the ids that follow ``prompt``, up to and without the first of ``stop_ids``.

    Past the context length the model sees the last ``context_length`` tokens. Raises UserError for an empty prompt or
    ids outside the model's vocabulary.
    """
    vocab_size, context = model.config.vocab_size or 0, model.config.context_length
    if not prompt:
        raise UserError("The prompt is empty; give at least one token, such as the end-of-text token.")
    if bad := [token_id for token_id in prompt if not 0 <= token_id < vocab_size]:
        raise UserError(f"The prompt holds token id {bad[0]}, outside the model's vocabulary of {vocab_size:,}.")
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    ids = torch.tensor([prompt], device=device)
    for _ in range(max_new_tokens):
        logits = model(ids[:, -context:])[:, -1]
        probabilities = next_token_probabilities(logits, temperature, top_p)
        following = torch.multinomial(probabilities, 1, generator=generator)
        token_id = int(following)
        if token_id in stop_ids:
            return
        yield token_id
        ids = torch.cat((ids, following), dim=1)


def complete(model: TransformerLM, tokenizer: Tokenizer, prompt: str, config: SampleConfig, seed: int) -> str:
    """The text that the model adds to ``prompt``, a user's words in which special tokens are plain text.

    Stops at any special token. An empty prompt begins a new document where ``<|endoftext|>`` ends
    them. Raises UserError when the model and the tokenizer
    do not belong together.
    """
    if model.config.vocab_size != tokenizer.size:
        raise UserError(
            f"The model has a vocabulary of {model.config.vocab_size:,}, the tokenizer {tokenizer.size:,}; "
            "they do not belong together."
        )
    stop_ids = set(tokenizer.special_ids.values())
    ids = tokenizer.encode(prompt, allowed_special=())
    if not ids and END_OF_TEXT in tokenizer.special_ids:
        ids = [tokenizer.special_ids[END_OF_TEXT]]
    new = generate(model, ids, config.max_new_tokens, config.temperature, config.top_p, stop_ids, seed)
    return tokenizer.decode(new)
