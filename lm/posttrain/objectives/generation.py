"""Responses of a model to prompts in its chat template: sampled for rollouts, or greedy for evaluations."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lm.data.chat_template import TRAINING_DAY, encode_chat_prompt, find_end_ids
from lm.data.dialogs import Message
from lm.inference.completion import Completion
from lm.inference.config import SampleConfig
from lm.inference.engine import generate
from lm.inference.generation_request import Generation
from lm.model.transformer import TransformerLM
from lm.tokenizer.tokenizer import Tokenizer
from lm.train.config import TrainConfig

log = logging.getLogger(__name__)

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
    """The response without the end token. Other special tokens in it stay as text."""


def encode_prompts(
    tokenizer: Tokenizer, prompts: Sequence[str | Sequence[Message]], context_length: int
) -> dict[int, list[int]]:
    """Return the ids of each prompt by its index: of a message of the user, or of messages that end with the user's.

    Prompts that leave no room for a response are left out, with one warning for all.
    """
    dialogs = [[Message(role="user", content=prompt)] if isinstance(prompt, str) else prompt for prompt in prompts]
    encoded = [encode_chat_prompt(tokenizer, dialog, day=TRAINING_DAY) for dialog in dialogs]
    left_out = [index for index, ids in enumerate(encoded) if len(ids) >= context_length]
    if left_out:
        log.warning(
            "%d of %d prompts leave no room for a response in the model's context of %d tokens and are left out, the "
            "first one has %d: %r… A model with a longer context takes them.",
            len(left_out),
            len(encoded),
            context_length,
            len(encoded[left_out[0]]),
            dialogs[left_out[0]][-1]["content"][:60],
        )
    return {index: ids for index, ids in enumerate(encoded) if len(ids) < context_length}


def generate_rollouts(
    model: TransformerLM,
    tokenizer: Tokenizer,
    prompts: Sequence[list[int]],
    seeds: Sequence[int] | None,
    max_new_tokens: int,
) -> list[Rollout]:
    """Return a response to each prompt. It ends with the end token, or at ``max_new_tokens`` or the context's end.

    A response depends on its prompt and its seed only, not on the others. Without ``seeds`` it has the most likely
    tokens.
    """
    end_ids = find_end_ids(tokenizer)
    # The gradient is of the distribution at the temperature 1.
    sampling = SampleConfig(temperature=0.0 if seeds is None else 1.0, top_p=1.0)
    runs = [
        Generation(
            prompt,
            min(max_new_tokens, model.config.context_length - len(prompt)),
            sampling,
            seed=seed,
            wants_logprobs=True,
            on_token=lambda token_id: token_id in end_ids,
        )
        for prompt, seed in zip(prompts, seeds or [0] * len(prompts), strict=True)
    ]
    if runs:
        # The trainer evaluates under autocast, but the keys and values in the engine's cache have the model's own type.
        with torch.autocast(model.token_embeddings.weight.device.type, enabled=False):
            generate(model, runs, _MAX_BATCH_SIZE)
    texts = [tokenizer.decode(run.ids[:-1] if end_ids.intersection(run.ids[-1:]) else run.ids) for run in runs]
    return [Rollout(list(run.prompt), run.ids, run.logprobs, text) for run, text in zip(runs, texts, strict=True)]


def answer_greedily(
    model: TransformerLM, tokenizer: Tokenizer, prompts: Sequence[str], max_new_tokens: int
) -> dict[int, Rollout]:
    """Return the most likely response to each prompt by its index; see :func:`encode_prompts`."""
    ids = encode_prompts(tokenizer, prompts, model.config.context_length)
    rollouts = generate_rollouts(model, tokenizer, [*ids.values()], None, max_new_tokens)
    return dict(zip(ids, rollouts, strict=True))


def answer_prompts(model: TransformerLM, tokenizer: Tokenizer, config: TrainConfig) -> list[Completion]:
    """Answer the prompts of ``config.sample_prompts`` with the most likely tokens, to show the training's progress."""
    prompts = config.sample_prompts
    rollouts = answer_greedily(model, tokenizer, prompts, config.sample_tokens)
    return [Completion(prompts[index], rollout.text, len(rollout.ids)) for index, rollout in rollouts.items()]
