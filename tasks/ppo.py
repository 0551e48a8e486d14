"""Stage ``ppo``: train the model on the rewards that a reward model gives to its own responses."""

from lm.posttrain.config import PPOConfig
from tasks.pages import posttrain as pages
from tasks.runtime.context import Attempt
from tasks.runtime.machine import training_slot
from tasks.runtime.output import Output
from tasks.runtime.posttraining import make_posttrain_job, reward_weights
from tasks.runtime.stage import stage
from tasks.runtime.training import best_checkpoint, run_training


@stage("ppo", page=pages.training, slot=training_slot, is_resumable=True)
def ppo(
    out: Attempt,
    model: Output,
    reward_model: Output,
    tokenizer: Output,
    data: Output,
    config: PPOConfig,
    libraries: dict[str, str] | None = None,
) -> None:
    """Learn from the rewards of a reward model (PPO). ``libraries``: versions of those that compute rewards, for the
    key."""
    from lm.posttrain.objectives.ppo import PPO

    job = make_posttrain_job(out, PPO.method, model, tokenizer, data, config.train, config)
    job.reward_model = best_checkpoint(out, reward_model)
    job.digests["reward_model"] = reward_model.digest
    job.rewards = reward_weights(data, config.rewards)
    run_training(out, job, pages.unfinished)
