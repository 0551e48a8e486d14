"""Responses of a model to prompts in its chat template: sampled for rollouts, or greedy for evaluations."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lm.common.errors import UserError
from lm.data.chat_template import END_TOKEN, encode_chat_prompt
from lm.data.dialogs import Message
from lm.inference.config import SampleConfig
from lm.inference.engine import Generation, generate
from lm.model.transformer import TransformerLM
from lm.tokenizer.tokenizer import Tokenizer

ROLLOUT_SAMPLING = SampleConfig(temperature=1.0, top_p=1.0)  # the gradient is of this distribution
GREEDY = SampleConfig(temperature=0.0)
_MAX_BATCH_SIZE = 128


@dataclass(frozen=True)
class Rollout:
    """A response and the probabilities it was sampled with."""

    prompt_ids: list[int]
    ids: list[int]
    """The response, with the end token if the model ended it."""
    log_probs: list[float]
    """Log-probability of each of ``ids``, in nats."""
    text: str
    """The response without the end token."""


def encode_prompts(
    tokenizer: Tokenizer, prompts: Sequence[str | Sequence[Message]], context_length: int
) -> list[list[int]]:
    """Return the ids of each prompt: a message of the user, or messages that end with the user's.

    Raises UserError for a prompt that leaves no room.
    """
    dialogs = [[Message(role="user", content=prompt)] if isinstance(prompt, str) else prompt for prompt in prompts]
    encoded = [encode_chat_prompt(tokenizer, dialog) for dialog in dialogs]
    for dialog, ids in zip(dialogs, encoded, strict=True):
        if len(ids) >= context_length:
            prompt = dialog[-1]["content"]
            raise UserError(
                f"A prompt has {len(ids)} tokens, which leaves no room for a response in the model's context of "
                f"{context_length}: {prompt[:60]!r}… Leave it out, or use a model with a longer context."
            )
    return encoded


def generate_rollouts(
    model: TransformerLM,
    tokenizer: Tokenizer,
    prompts: Sequence[list[int]],
    seeds: Sequence[int],
    max_new_tokens: int,
    sampling: SampleConfig = ROLLOUT_SAMPLING,
) -> list[Rollout]:
    """Return a response to each prompt. It ends with the end token, or at ``max_new_tokens`` or the context's end.

    A response depends on its prompt and its seed only, not on the others.
    """
    end_id = tokenizer.special_ids[END_TOKEN]
    runs = [
        Generation(
            prompt,
            min(max_new_tokens, model.config.context_length - len(prompt)),
            sampling,
            seed=seed,
            wants_logprobs=True,
            on_token=lambda token_id: token_id == end_id,
        )
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    if runs:
        # The trainer evaluates under autocast, but the keys and values in the engine's cache have the model's own type.
        with torch.autocast(model.token_embeddings.weight.device.type, enabled=False):
            generate(model, runs, _MAX_BATCH_SIZE)
    return [Rollout(list(run.prompt), run.ids, run.logprobs, decode_response(tokenizer, run.ids)) for run in runs]


def decode_response(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return the text of a response, up to the end token. Other special tokens in it stay as text."""
    end_id = tokenizer.special_ids[END_TOKEN]
    return tokenizer.decode(ids[:-1] if ids and ids[-1] == end_id else ids)
