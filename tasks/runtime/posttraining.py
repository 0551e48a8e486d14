"""What the stages of post-training share: the job of a method, and the rewards of a task."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Literal

from lm.common.errors import UserError
from lm.posttrain.config import PPOConfig, PreferenceConfig, ReinforceConfig, RewardModelConfig
from lm.train.config import TrainConfig
from tasks.runtime.context import Attempt
from tasks.runtime.output import Output
from tasks.runtime.training import best_checkpoint, relative_path

if TYPE_CHECKING:
    from lm.posttrain.job import PosttrainJob

_EXAMPLES = {
    "sft": "dialogs",
    "preference": "pairs",
    "reward_model": "pairs",
    "reinforce": "problems",
    "ppo": "problems",
}


def make_posttrain_job(
    out: Attempt,
    method: Literal["sft", "preference", "reward_model", "reinforce", "ppo"],
    model: Output,
    tokenizer: Output,
    data: Output,
    config: TrainConfig,
    method_config: PreferenceConfig | RewardModelConfig | ReinforceConfig | PPOConfig | None = None,
) -> "PosttrainJob":
    """Return the job of a method. ``data`` is the output of ``dialogs``, ``tokenizer`` that of ``base``.

    Raises UserError if there are no examples for the method.
    """
    from lm.posttrain.job import PosttrainJob

    counts = {kind: data.manifest["figures"][kind]["train"] for kind in ("dialogs", "pairs", "problems")}
    kind = _EXAMPLES[method]
    if method == "ppo" and not counts[kind]:
        kind = "pairs"  # their prompts
    if not counts[kind]:
        field = "dialogs.task" if kind == "problems" else "dialogs.train"
        raise UserError(f"There are no {kind} for the stage {method}. Name some in {field}, or leave the stage out.")
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


def reward_weights(data: Output, weights: dict[str, float]) -> dict[str, float]:
    """Return the weight of each reward by name: of the config, or else the reward of the task."""
    name = data.json("examples.json")["reward"]
    return weights or ({name: 1.0} if name else {})
