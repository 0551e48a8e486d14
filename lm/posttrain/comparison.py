"""Evaluation of a model on the held-out data of post-training."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from lm.data.dialogs import Dialog
from lm.eval.reward_worker import RewardWorker
from lm.eval.tasks import Problem
from lm.inference.packed import prepare_for_inference
from lm.model.transformer import TransformerLM
from lm.posttrain.config import ComparisonConfig
from lm.posttrain.rollout import GREEDY, encode_prompts, generate_rollouts
from lm.posttrain.sft_objective import SupervisedFineTuning
from lm.tokenizer.tokenizer import Tokenizer
from lm.train.config import TrainConfig


@dataclass(frozen=True)
class Answer:
    """A greedy response."""

    prompt: str
    response: str
    tokens: int
    ground_truth: Any = None
    rewards: dict[str, float] | None = None


@dataclass(frozen=True)
class Evaluation:
    """The figures of a model, and its answers."""

    answer_loss: float | None
    """Mean loss on the held-out dialogs' answers, in nats per token."""
    reward: float | None
    """Mean reward on the problems, and its parts."""
    format_reward: float | None
    answer_reward: float | None
    response_tokens: float | None
    answers: list[Answer]

    @property
    def figures(self) -> dict[str, float | None]:
        """All except the answers."""
        return {name: value for name, value in asdict(self).items() if name != "answers"}


@torch.no_grad()
def evaluate_model(
    model: TransformerLM,
    tokenizer: Tokenizer,
    dialogs: Sequence[Dialog],
    problems: Sequence[Problem],
    reward: RewardWorker | None,
    config: ComparisonConfig,
) -> Evaluation:
    """Return the loss on ``dialogs``, the rewards of greedy responses to ``problems``, and answers to all prompts.

    The weights of ``model`` are packed for inference.
    """
    loss = None
    if dialogs:
        objective = SupervisedFineTuning(TrainConfig(batch_size=16), model, tokenizer, dialogs, dialogs, {})
        loss = objective.evaluate(model, is_final=True)["valid_loss"]
    model = prepare_for_inference(model)  # afterwards, because a packed model has no loss
    prompts = [*config.prompts, *(problem.prompt for problem in problems)]
    ids = encode_prompts(tokenizer, prompts, model.config.context_length)
    rollouts = generate_rollouts(model, tokenizer, ids, [0] * len(ids), config.max_new_tokens, GREEDY)
    answers = [
        Answer(prompt, rollout.text, len(rollout.ids)) for prompt, rollout in zip(prompts, rollouts, strict=True)
    ]
    first = len(config.prompts)
    if reward:
        for place, problem in enumerate(problems, start=first):
            rewards = reward.score(answers[place].response, problem.ground_truth).rewards
            answers[place] = Answer(
                problem.prompt, answers[place].response, answers[place].tokens, problem.ground_truth, rewards
            )
    scored = [(answer.tokens, answer.rewards) for answer in answers[first:] if answer.rewards]

    def mean(name: str) -> float | None:
        return sum(rewards[name] for _, rewards in scored) / len(scored) if scored else None

    tokens = sum(tokens for tokens, _ in scored) / len(scored) if scored else None
    return Evaluation(loss, mean("reward"), mean("format_reward"), mean("answer_reward"), tokens, answers)
