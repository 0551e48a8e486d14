"""The flow ``posttrain``, from a model that continues text to one that does what it is asked: configuration and stages.

This is the only description of the order of the stages.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, get_args

from flows.config import FlowConfig, PipelineConfig, complete
from flows.pipeline import find_start, open_start
from flows.plan import Executor
from lm.common.config import validate_fields
from lm.common.errors import UserError
from lm.model.config import AdapterConfig
from lm.posttrain.config import (
    ComparisonConfig,
    DialogsConfig,
    DistillConfig,
    DPOConfig,
    GRPOConfig,
    Method,
    PPOConfig,
    RewardModelConfig,
)
from lm.train.config import TrainConfig
from tasks.base import base
from tasks.dialogs import dialogs, find_dialog_sources
from tasks.evaluate import evaluate
from tasks.posttrain import distill, ppo, preference, reinforce, reward_model, sft
from tasks.runs.models import PRETRAINED_STAGES, latest_model
from tasks.runtime.execution import Execution
from tasks.runtime.output import Ref
from tasks.runtime.store import Store
from tasks.start_model import check_teacher

PosttrainStage = Literal[
    "base", "dialogs", "sft", "distill", "preference", "reward_model", "reinforce", "ppo", "evaluate"
]


@dataclass(frozen=True)
class PosttrainConfig(FlowConfig):
    """Configuration of the flow ``posttrain``."""

    STAGES = get_args(PosttrainStage)
    PRESETS = PipelineConfig.PRESETS / "posttrain"
    PRESET_TEXTS = {  # noqa: RUF012 # dataclasses take an annotation for a field
        "demo": "generated additions, two minutes on two CPU cores",
        "dialogs": "fine-tuning on dialogs of your own",
    }

    name: str = "posttrain-demo"
    """Name of the run, for --model and textmill runs. It has no effect on results. Default: two words at random."""
    base: str = ""
    """Model to start from: the name of a run below the root, or a directory of Hugging Face or Meta. Default: the model
    that the pipeline trained last."""
    methods: list[Method] = field(default_factory=lambda: ["sft", "reinforce"])
    """Training methods. They run in the order sft, distill, preference, reward_model, reinforce, ppo, each from the
    model of the one before. distill requires distill.teacher. ppo requires reward_model; the reward model is not used
    as the next starting model."""
    dialogs: DialogsConfig = field(default_factory=DialogsConfig)
    """Dialogs, pairs of answers, and problems with a reward."""
    sft: TrainConfig = field(default_factory=lambda: TrainConfig(steps=300, max_lr=1e-4, min_lr=0, warmup_steps=20))
    """Supervised fine-tuning. batch_size: packed rows per step."""
    distill: DistillConfig = field(default_factory=DistillConfig)
    """Distillation on policy from a teacher."""
    preference: DPOConfig = field(default_factory=DPOConfig)
    """Direct preference optimization."""
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    """The reward model for ppo."""
    reinforce: GRPOConfig = field(default_factory=GRPOConfig)
    """Policy gradients."""
    ppo: PPOConfig = field(default_factory=PPOConfig)
    """Proximal policy optimization with the reward model."""
    evaluate: ComparisonConfig = field(default_factory=ComparisonConfig)
    """Comparison of the models before and after."""
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    """A small adapter (LoRA) that each method trains. Off by default."""
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
            raise UserError(
                "methods has ppo without reward_model. ppo learns from a reward model; add reward_model to methods."
            )

        if "distill" in self.methods and not self.distill.teacher:
            raise UserError("methods has distill, which learns from another model; name it in distill.teacher.")
        if self.distill.teacher and "distill" not in self.methods:
            raise UserError("distill.teacher names a teacher, but methods has no distill; add it to methods.")

    @property
    def judged(self) -> GRPOConfig | PPOConfig:
        """The method whose rewards are those of the comparison."""
        return self.ppo if "ppo" in self.methods else self.reinforce

    def arguments(self, method: str) -> list[Any]:
        """Return the arguments of the stage of a method besides its inputs. Only with an adapter, that is one."""
        settings, libraries = getattr(self, method), self.libraries(method)
        if not self.adapter.is_on:
            return [settings, *libraries]
        if method == "sft":
            settings = self.rate_of_adapter(method)
        else:
            settings = replace(settings, train=self.rate_of_adapter(f"{method}.train"))
        return [settings, libraries[0] if libraries else None, self.adapter]

    def why_missing(self, stage: str) -> str:
        """Return why a run with this configuration has no such stage; empty if it has one."""
        if stage in get_args(Method) and stage not in self.methods:
            return f"There is no stage {stage}: methods is {', '.join(self.methods)}. Add it, or name another."
        return ""

    def check_stages(self, until: str | None, refresh: Sequence[str]) -> None:
        """Raise UserError if a run with this configuration up to ``until`` does not reach a stage of ``refresh``, or
        needs a library that is not installed. The user learns it now, not after the trainings before that stage."""
        super().check_stages(until, refresh)
        for stage in self.STAGES[: self.STAGES.index(until or "evaluate") + 1]:
            self.libraries(stage)

    def libraries(self, stage: str) -> list[dict[str, str]]:
        """Return the versions of the libraries that decide the output of a stage, as its last argument; empty if none
        do. Raises UserError if one is not installed."""
        from lm.eval.problems import problem_libraries, reward_libraries

        task, versions = self.dialogs.task, dict[str, str]()
        if stage == "dialogs":
            versions = problem_libraries(task)
        elif stage == "evaluate":
            versions = reward_libraries(task, self.judged.rewards)
        elif stage in ("reinforce", "ppo") and stage in self.methods:
            versions = reward_libraries(task, getattr(self, stage).rewards)
        elif stage == "distill" and stage in self.methods:
            versions = reward_libraries(task, {})
        return [versions] if versions else []  # only then an argument, and part of the key

    def has_demo_problems(self) -> bool:
        """Return whether the generated additions of the preset ``demo`` are mixed into dialogs of the user's own."""
        return bool(self.dialogs.train) and self.dialogs.task == PosttrainConfig.load_preset("demo").dialogs.task


def posttrain_stages(config: PosttrainConfig, executor: Executor) -> None:
    """Run all stages."""
    model, sources, teacher = executor.find_inputs(_find_inputs)
    start = executor.finish(executor.call(base, *open_start(model, executor)))
    judges = dict[str, Ref]()
    if teacher is not None:
        judges["distill"], tokenizer = open_start(teacher, executor)
        executor.read(check_teacher, judges["distill"], tokenizer, start)
    data = executor.finish(executor.call(dialogs, *sources, config.dialogs, *config.libraries("dialogs")))
    models = [start]
    for stage in (sft, distill, preference, reward_model, reinforce, ppo):
        if stage.name in config.methods:
            arguments = start, data, *config.arguments(stage.name)
            judge = [judges[stage.name]] if stage.name in judges else []
            output = executor.finish(executor.call(stage, models[-1], *judge, *arguments))
            if stage is reward_model:
                judges["ppo"] = output
            else:
                models.append(output)
    rewards = config.judged.rewards, config.judged.reward_seconds
    executor.finish(
        executor.call(evaluate, models, start, data, *rewards, config.evaluate, *config.libraries("evaluate"))
    )


def _find_inputs(config: PosttrainConfig, store: Store) -> tuple[Any, Any, Any]:
    """Return the model to start from, the sources of the dialogs and the problems, and the teacher if there is one."""
    model = find_start(config.base, store) if config.base else latest_model(store, store.base, PRETRAINED_STAGES)
    teacher = find_start(config.distill.teacher, store) if config.distill.teacher else None
    return model, find_dialog_sources(config.dialogs, store), teacher


posttrain: Any  # the flow, see __getattr__


@functools.cache
def __getattr__(name: str) -> Any:
    """Make the flow at its first use: the command line imports this module too, and Prefect takes seconds."""
    if name != "posttrain":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from prefect import flow
    from pydantic import BeforeValidator

    from flows.executor import FLOW_OPTIONS, check_device, run_stages

    demo = PosttrainConfig.load_preset("demo")
    validator = BeforeValidator(functools.partial(complete, default=demo))

    @flow(name="posttrain", **FLOW_OPTIONS)
    def posttrain(
        config: Annotated[PosttrainConfig, validator] = demo,
        root: str = "artifacts",
        until: PosttrainStage | None = None,
        refresh: tuple[PosttrainStage, ...] = (),
    ) -> dict[str, Any]:
        """Fine-tune a trained model on dialogs, preferences or rewards. Unchanged stages are taken from the cache.

        Args:
            config: Configuration of all stages.
            root: Directory or fsspec URL of the base model's run and of all outputs.
            until: Last stage to run; default: all stages.
            refresh: Stages to run again even if they are cached.
        """
        if until not in ("base", "dialogs"):
            check_device(config.execution.device)
        return run_stages(posttrain_stages, config, root, until, refresh)

    return posttrain
