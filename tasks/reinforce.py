"""Stage ``reinforce``: train the model on rewards of its own responses."""

from lm.posttrain.config import GRPOConfig
from tasks.pages import posttrain as pages
from tasks.runtime.context import Attempt
from tasks.runtime.machine import training_slot
from tasks.runtime.output import Output
from tasks.runtime.posttraining import make_posttrain_job, reward_weights
from tasks.runtime.stage import stage
from tasks.runtime.training import run_training


@stage("reinforce", page=pages.training, slot=training_slot, is_resumable=True)
def reinforce(
    out: Attempt,
    model: Output,
    tokenizer: Output,
    data: Output,
    config: GRPOConfig,
    libraries: dict[str, str] | None = None,
) -> None:
    """Learn from rewards of the model's own responses. ``libraries``: versions of those that compute rewards, for the
    key."""
    from lm.posttrain.objectives.grpo import GRPO

    job = make_posttrain_job(out, GRPO.method, model, tokenizer, data, config.train, config)
    job.rewards = reward_weights(data, config.rewards)
    run_training(out, job, pages.unfinished)
