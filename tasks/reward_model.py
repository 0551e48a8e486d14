"""Stage ``reward_model``: train a model of rewards on pairs of answers."""

from lm.posttrain.config import RewardModelConfig
from tasks.pages import posttrain as pages
from tasks.runtime.context import Attempt
from tasks.runtime.machine import training_slot
from tasks.runtime.output import Output
from tasks.runtime.posttraining import make_posttrain_job
from tasks.runtime.stage import stage
from tasks.runtime.training import run_training


@stage(
    "reward_model",
    page=pages.training,
    slot=training_slot,
    is_resumable=True,
)
def reward_model(out: Attempt, model: Output, tokenizer: Output, data: Output, config: RewardModelConfig) -> None:
    """Learn which answer of a pair is better."""
    from lm.posttrain.objectives.reward_model import RewardModeling

    job = make_posttrain_job(out, RewardModeling.method, model, tokenizer, data, config.train, config)
    run_training(out, job, pages.unfinished)
