"""Evaluation of a model on the held-out data of post-training."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from lm.data.chat_template import encode_dialog, encode_rows, find_end_ids
from lm.data.dialogs import Dialog
from lm.data.packing import has_target
from lm.eval.evaluate import Response, ScoredResponse, Summary, score_responses, summarize
from lm.eval.problems import Problem, PromptFormat
from lm.eval.reward_worker import RewardWorker
from lm.inference.runners.runner import prepare_for_inference
from lm.model.transformer import TransformerLM
from lm.posttrain.config import ComparisonConfig
from lm.posttrain.job import ObjectiveInputs
from lm.posttrain.objectives.generation import answer_greedily
from lm.posttrain.objectives.sft import SupervisedFineTuning
from lm.tokenizer.tokenizer import Tokenizer
from lm.train.config import TrainConfig


@dataclass(frozen=True)
class Evaluation:
    """The figures of a model, and its greedy responses."""

    answer_loss: float | None
    """Mean loss on the held-out dialogs' answers, in nats per token."""
    summary: Summary | None
    """Figures of the responses to the problems."""
    samples: list[tuple[str, str]]
    """Prompts of the config, each with its response."""
    responses: list[ScoredResponse]
    """Responses to the problems, with their rewards."""

    @property
    def figures(self) -> dict[str, Any]:
        """All except the texts."""
        return {"answer_loss": self.answer_loss, **(asdict(self.summary) if self.summary else {})}


@torch.no_grad()
def compare_model(
    model: TransformerLM,
    tokenizer: Tokenizer,
    dialogs: Sequence[Dialog],
    problems: Sequence[Problem],
    reward: RewardWorker | None,
    config: ComparisonConfig,
) -> Evaluation:
    """Return the loss on ``dialogs``, the rewards of greedy responses to ``problems``, and responses to all prompts.

    Dialogs without an answer within the context have no loss, and prompts that leave no room have no response. The
    weights of ``model`` are packed for inference.
    """
    loss, context_length = None, model.config.context_length
    encoded = encode_rows(dialogs, lambda dialog: encode_dialog(tokenizer, dialog.messages))
    dialogs = [dialog for dialog, example in encoded if has_target(example, context_length)]
    if dialogs:
        objective = SupervisedFineTuning(
            TrainConfig(batch_size=16), ObjectiveInputs(model, tokenizer, dialogs, dialogs)
        )
        loss = objective.evaluate(model, is_final=True)["valid_loss"]
    model = prepare_for_inference(model)  # afterwards, because a packed model has no loss
    answers = answer_greedily(model, tokenizer, config.prompts, config.max_new_tokens)
    samples = [(config.prompts[index], rollout.text) for index, rollout in answers.items()]
    scored: list[ScoredResponse] = []
    if reward:
        rollouts = answer_greedily(model, tokenizer, [problem.prompt for problem in problems], config.max_new_tokens)
        dialogs_of_problems = [PromptFormat().format(problem) for problem in problems]
        end_ids = find_end_ids(tokenizer)
        responses = [
            (
                index,
                Response(
                    rollout.text, len(rollout.ids), "stop" if end_ids.intersection(rollout.ids[-1:]) else "length"
                ),
            )
            for index, rollout in rollouts.items()
        ]
        scored = [*score_responses(problems, dialogs_of_problems, responses, reward)]
    return Evaluation(loss, summarize(scored) if scored else None, samples, scored)
