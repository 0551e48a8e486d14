"""Stage ``sft``: fine-tune the model on dialogs."""

from lm.train.config import TrainConfig
from tasks.pages import posttrain as pages
from tasks.runtime.context import Attempt
from tasks.runtime.machine import training_slot
from tasks.runtime.output import Output
from tasks.runtime.posttraining import make_posttrain_job
from tasks.runtime.stage import stage
from tasks.runtime.training import run_training


@stage("sft", page=pages.training, slot=training_slot, is_resumable=True)
def sft(out: Attempt, model: Output, tokenizer: Output, data: Output, config: TrainConfig) -> None:
    """Learn the answers of dialogs."""
    from lm.posttrain.objectives.sft import SupervisedFineTuning

    job = make_posttrain_job(out, SupervisedFineTuning.method, model, tokenizer, data, config)
    run_training(out, job, pages.unfinished)
