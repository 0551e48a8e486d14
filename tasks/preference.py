"""Stage ``preference``: train the model on pairs of answers."""

from lm.posttrain.config import DPOConfig
from tasks.pages import posttrain as pages
from tasks.runtime.context import Attempt
from tasks.runtime.machine import training_slot
from tasks.runtime.output import Output
from tasks.runtime.posttraining import make_posttrain_job
from tasks.runtime.stage import stage
from tasks.runtime.training import run_training


@stage("preference", page=pages.training, slot=training_slot, is_resumable=True)
def preference(out: Attempt, model: Output, tokenizer: Output, data: Output, config: DPOConfig) -> None:
    """Learn from pairs of answers (DPO)."""
    from lm.posttrain.objectives.dpo import DPO

    job = make_posttrain_job(out, DPO.method, model, tokenizer, data, config.train, config)
    run_training(out, job, pages.unfinished)
