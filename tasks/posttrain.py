"""Stages of post-training: ``sft``, ``distill``, ``preference`` (DPO), ``reward_model``, ``reinforce`` (GRPO), and
``ppo``."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lm.common.errors import UserError
from lm.model.config import AdapterConfig
from lm.posttrain.config import DistillConfig, DPOConfig, GRPOConfig, PPOConfig, RewardModelConfig, reward_weights
from lm.train.config import TrainConfig
from tasks.pages import posttrain as pages
from tasks.runtime.locks import training_slot
from tasks.runtime.output import Output
from tasks.runtime.run_context import Attempt
from tasks.runtime.stage import Stage, stage
from tasks.runtime.training_process import best_checkpoint, relative_path, run_training

if TYPE_CHECKING:
    from lm.posttrain.config import Method
    from lm.posttrain.job import PosttrainJob

_EXAMPLES = {
    "sft": "dialogs",
    "distill": "problems",
    "preference": "pairs",
    "reward_model": "pairs",
    "reinforce": "problems",
    "ppo": "problems",
}
_PROMPTS = {"distill": "dialogs", "ppo": "pairs"}
"""Examples whose prompts a method takes if there are no problems."""


def _options(objective: str) -> dict[str, Any]:
    """Return the options of a stage that trains with an objective. The job file names it, so no import shows it."""
    runs = (f"lm.posttrain.objectives.{objective}",)
    return {"page": pages.training, "slot": training_slot, "is_resumable": True, "runs": runs}


def _posttrain_stage(name: "Method", objective: str) -> Stage:
    """Return the stage of a method. ``libraries``: versions of those that compute rewards, for the key. ``adapter``:
    the adapter to train in place of all weights."""

    def train(
        out: Attempt,
        model: Output,
        tokenizer: Output,
        data: Output,
        config: TrainConfig | DPOConfig | RewardModelConfig | GRPOConfig,
        libraries: dict[str, str] | None = None,
        adapter: AdapterConfig | None = None,
    ) -> None:
        run_training(
            out, make_posttrain_job(out, name, model, tokenizer, data, config, adapter=adapter), pages.unfinished
        )

    train.__qualname__ = name  # where pickle finds the stage
    return Stage(name, train, **_options(objective))


sft = _posttrain_stage("sft", "sft")  # learns the answers of dialogs
preference = _posttrain_stage("preference", "dpo")  # learns from pairs of answers
reward_model = _posttrain_stage("reward_model", "reward_model")  # learns which answer of a pair is better
reinforce = _posttrain_stage("reinforce", "grpo")  # learns from rewards of the model's own responses


@stage("ppo", **_options("ppo"))
def ppo(
    out: Attempt,
    model: Output,
    reward_model: Output,
    tokenizer: Output,
    data: Output,
    config: PPOConfig,
    libraries: dict[str, str] | None = None,
    adapter: AdapterConfig | None = None,
) -> None:
    """Learn from the rewards of a reward model."""
    job = make_posttrain_job(out, "ppo", model, tokenizer, data, config, reward_model, adapter=adapter)
    run_training(out, job, pages.unfinished)


@stage("distill", **_options("distillation"))
def distill(
    out: Attempt,
    model: Output,
    teacher: Output,
    tokenizer: Output,
    data: Output,
    config: DistillConfig,
    libraries: dict[str, str] | None = None,
    adapter: AdapterConfig | None = None,
) -> None:
    """Learn the probabilities that a teacher gives to the next tokens."""
    job = make_posttrain_job(out, "distill", model, tokenizer, data, config, teacher=teacher, adapter=adapter)
    run_training(out, job, pages.unfinished)


def make_posttrain_job(
    out: Attempt,
    method: "Method",
    model: Output,
    tokenizer: Output,
    data: Output,
    config: TrainConfig | DistillConfig | DPOConfig | RewardModelConfig | GRPOConfig | PPOConfig,
    reward_model: Output | None = None,
    teacher: Output | None = None,
    adapter: AdapterConfig | None = None,
) -> "PosttrainJob":
    """Return the job of a method. ``data`` is the output of ``dialogs``, ``tokenizer`` that of ``base``.

    Raises UserError if there are no examples for the method.
    """
    from lm.posttrain.job import PosttrainJob

    figures, examples = data.manifest["figures"], _EXAMPLES[method]
    if method in _PROMPTS and not figures[examples]["train"]:
        examples = _PROMPTS[method]
    if not figures[examples]["train"]:
        raise UserError(_explain_no_examples(method, examples, figures))
    train = config if isinstance(config, TrainConfig) else config.train
    settings = {name: value for name, value in asdict(config).items() if name != "train"} if config is not train else {}
    rewards: dict[str, float] = {}
    if isinstance(config, (DistillConfig, GRPOConfig, PPOConfig)):
        own = {} if isinstance(config, DistillConfig) else config.rewards  # distillation only logs that of the task
        rewards = reward_weights(own, data.json("examples.json")["reward"])
    inputs = {"model": model, "tokenizer": tokenizer, "examples": data}
    inputs |= {name: output for name, output in (("reward_model", reward_model), ("teacher", teacher)) if output}
    return PosttrainJob(
        config=train,
        method=method,
        settings=settings,
        model=best_checkpoint(out, model),
        tokenizer=relative_path(out, tokenizer.directory("tokenizer")),
        train=relative_path(out, data.path(f"{examples}-train.jsonl")),
        valid=relative_path(out, data.path(f"{examples}-valid.jsonl")),
        rewards=rewards,
        reward_model=best_checkpoint(out, reward_model) if reward_model else "",
        teacher=best_checkpoint(out, teacher) if teacher else "",
        digests={name: output.digest for name, output in inputs.items()},
        out=".",
        execution=out.run.execution,
        adapter=adapter or AdapterConfig(),
    )


def _explain_no_examples(method: str, kind: str, figures: dict[str, Any]) -> str:
    """Return why a method has no examples: no files are named, or no row of them can be used."""
    field = "dialogs.task" if kind == "problems" else "dialogs.train"
    unused = {
        "are held out": figures[kind]["valid"],
        "ask the same as a held-out or tested one": figures["left_out"],
        "are damaged": figures["damaged"],
    }
    if not any(unused.values()):
        return f"There are no {kind} for the stage {method}. Name some in {field}, or leave the stage out."
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in unused.items() if count)
    return (
        f"No {kind} are left to train on in the stage {method}: {reasons}. Add others in {field}, lower "
        "dialogs.valid_fraction, or leave the stage out."
    )
