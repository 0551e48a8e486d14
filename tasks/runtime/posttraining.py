"""What the stages of post-training share: the job of a method, and the rewards of a task."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lm.common.errors import UserError
from lm.posttrain.config import DPOConfig, GRPOConfig, PPOConfig, RewardModelConfig
from lm.train.config import TrainConfig
from tasks.runtime.context import Attempt
from tasks.runtime.output import Output
from tasks.runtime.training import best_checkpoint, relative_path

if TYPE_CHECKING:
    from lm.posttrain.job import Method, PosttrainJob

_EXAMPLES = {
    "sft": "dialogs",
    "preference": "pairs",
    "reward_model": "pairs",
    "reinforce": "problems",
    "ppo": "problems",
}


def make_posttrain_job(
    out: Attempt,
    method: "Method",
    model: Output,
    tokenizer: Output,
    data: Output,
    config: TrainConfig,
    method_config: DPOConfig | RewardModelConfig | GRPOConfig | PPOConfig | None = None,
) -> "PosttrainJob":
    """Return the job of a method. ``data`` is the output of ``dialogs``, ``tokenizer`` that of ``base``.

    Raises UserError if there are no examples for the method.
    """
    from lm.posttrain.job import PosttrainJob

    figures = data.manifest["figures"]
    kind = _EXAMPLES[method]
    if method == "ppo" and not figures[kind]["train"]:
        kind = "pairs"  # their prompts
    if not figures[kind]["train"]:
        raise UserError(_explain_no_examples(method, kind, figures))
    settings = (
        {name: value for name, value in asdict(method_config).items() if name != "train"} if method_config else {}
    )
    return PosttrainJob(
        config=config,
        method=method,
        settings=settings,
        model=best_checkpoint(out, model),
        tokenizer=relative_path(out, tokenizer.directory("tokenizer")),
        train=relative_path(out, data.path(f"{kind}-train.jsonl")),
        valid=relative_path(out, data.path(f"{kind}-valid.jsonl")),
        digests={"model": model.digest, "tokenizer": tokenizer.digest, "examples": data.digest},
        out=".",
        execution=out.run.execution,
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


def reward_weights(data: Output, weights: dict[str, float]) -> dict[str, float]:
    """Return the weight of each reward by name: of the config, or else the reward of the task."""
    name = data.json("examples.json")["reward"]
    return weights or ({name: 1.0} if name else {})
