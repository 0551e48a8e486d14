"""The configuration of a post-training, one section per subject, and its presets."""

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from flows.config import PRESETS, complete, load_config, preset_path
from lm.common.config import PYDANTIC_CONFIG, validate_fields
from lm.common.errors import UserError
from lm.posttrain.config import (
    ComparisonConfig,
    DialogsConfig,
    PPOConfig,
    PreferenceConfig,
    ReinforceConfig,
    RewardModelConfig,
)
from lm.train.config import TrainConfig
from tasks.runtime.execution import Execution

POSTTRAIN_PRESETS = PRESETS / "posttrain"

Method = Literal["sft", "preference", "reward_model", "reinforce", "ppo"]
PosttrainStage = Literal["base", "dialogs", "sft", "preference", "reward_model", "reinforce", "ppo", "evaluate"]


@dataclass(frozen=True)
class PosttrainConfig:
    """Configuration of the flow ``posttrain``."""

    __pydantic_config__ = PYDANTIC_CONFIG

    name: str = "posttrain-demo"
    """Name of this configuration, part of the names of artifacts in Prefect. It has no effect on results."""
    base: str = ""
    """Model to start from: the name of a run below the root, or a directory of Hugging Face or Meta. Default: the
    latest run of the pipeline."""
    methods: list[Method] = field(default_factory=lambda: ["sft", "reinforce"])
    """Training methods. They run in the order sft, preference, reward_model, reinforce, ppo, each from the model of the
    one before. ppo needs reward_model, whose result is no model to go on from."""
    dialogs: DialogsConfig = field(default_factory=DialogsConfig)
    """Dialogs, pairs of answers, and problems with a reward."""
    sft: TrainConfig = field(default_factory=lambda: TrainConfig(steps=300, max_lr=1e-4, min_lr=0, warmup_steps=20))
    """Supervised fine-tuning. batch_size: packed rows per step."""
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    """Direct preference optimization."""
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    """The reward model for ppo."""
    reinforce: ReinforceConfig = field(default_factory=ReinforceConfig)
    """Policy gradients."""
    ppo: PPOConfig = field(default_factory=PPOConfig)
    """Proximal policy optimization with the reward model."""
    evaluate: ComparisonConfig = field(default_factory=ComparisonConfig)
    """Comparison of the models before and after."""
    execution: Execution = field(default_factory=Execution)
    """How the work runs on this machine. It never causes a stage to run again."""

    def __post_init__(self) -> None:
        validate_fields(self, "posttrain")
        for name in get_args(Method):
            section = getattr(self, name)
            train = section if isinstance(section, TrainConfig) else section.train
            if train.data_order != "random":
                raise UserError(f"{name} reads its examples in shuffled epochs in any case; leave data_order out.")
            if train.init_from:
                raise UserError(
                    f"{name} starts from the model before it; name the first one in base, not in init_from."
                )
        if self.execution.train_deployment:
            raise UserError("execution.train_deployment is for the pipeline; leave it out of a post-training.")
        if {"reinforce", "ppo"} <= {*self.methods} and self.reinforce.rewards != self.ppo.rewards:
            raise UserError("reinforce.rewards and ppo.rewards differ; the comparison of the models needs equal ones.")
        if not self.dialogs.task and (self.dialogs.task_train or self.dialogs.task_test):
            raise UserError("dialogs.task_train and task_test are files of a task; name it in dialogs.task.")
        if not self.methods:
            raise UserError(f"methods is empty; name at least one of {', '.join(get_args(Method))}.")
        if "ppo" in self.methods and "reward_model" not in self.methods:
            raise UserError("methods has ppo without reward_model, which it learns from; add reward_model to methods.")


def load_posttrain_preset(name: str) -> PosttrainConfig:
    """Return the configuration of a preset. Fields that the preset omits have their defaults."""
    return load_config(PosttrainConfig, preset_path(name, POSTTRAIN_PRESETS))


def has_demo_problems(config: PosttrainConfig) -> bool:
    """Return whether the generated additions of the preset ``demo`` are mixed into dialogs of the user's own."""
    return bool(config.dialogs.train) and config.dialogs.task == load_posttrain_preset("demo").dialogs.task


def complete_posttrain_config(config: Any) -> Any:
    """Complete a partial ``config`` of the flow ``posttrain``; see :func:`flows.config.complete`."""
    return complete(config, load_posttrain_preset("demo"))
