"""The stages of the flow ``posttrain`` in their order. This is the only description of the order."""

from collections.abc import Iterator
from typing import NamedTuple, get_args

from flows.chain import Chain, Executor
from flows.posttrain_config import PosttrainConfig, PosttrainStage
from flows.start_model import StartModel, find_start, open_start
from lm.common.errors import UserError
from lm.eval.problems import problem_libraries, reward_libraries
from lm.posttrain.config import PPOConfig, ReinforceConfig
from lm.text.sources import Source
from tasks.base import base
from tasks.dialogs import dialogs, find_dialog_sources
from tasks.evaluate import evaluate
from tasks.ppo import ppo
from tasks.preference import preference
from tasks.reinforce import reinforce
from tasks.reward_model import reward_model
from tasks.runs.models import PRETRAINED_STAGES, latest_model
from tasks.runtime.output import Ref
from tasks.runtime.store import Store
from tasks.sft import sft

METHODS = {"sft": sft, "preference": preference, "reward_model": reward_model, "reinforce": reinforce, "ppo": ppo}


class PosttrainInputs(NamedTuple):
    """What the first stages need."""

    model: StartModel
    """The model to start from."""
    sources: list[list[Source]]
    """Sources of the dialogs and the problems, see :func:`tasks.dialogs.find_dialog_sources`."""


def _check_stage(config: PosttrainConfig, name: str | None) -> None:
    if name in METHODS and name not in config.methods:
        raise UserError(f"There is no stage {name}: methods is {', '.join(config.methods)}. Add it, or name another.")
    names = get_args(PosttrainStage)
    for stage in names[: names.index(name or "evaluate") + 1]:
        _libraries(config, stage)  # one that is missing is told now, not after the trainings before its stage


def _find_inputs(config: PosttrainConfig, store: Store) -> PosttrainInputs:
    model = find_start(config.base, store) if config.base else latest_model(store, store.base, PRETRAINED_STAGES)
    return PosttrainInputs(model, find_dialog_sources(config.dialogs, store))


def _stages(config: PosttrainConfig, inputs: PosttrainInputs, executor: Executor) -> Iterator[tuple[str, Ref]]:
    start = executor.call(base, *open_start(inputs.model, executor.call))
    yield "base", start
    data = executor.call(dialogs, *inputs.sources, config.dialogs, *_libraries(config, "dialogs"))
    yield "dialogs", data
    models, outputs = [start], dict[str, Ref]()
    for name, stage in METHODS.items():
        if name in config.methods:
            judges = [outputs["reward_model"]] if name == "ppo" else []
            arguments = start, data, getattr(config, name), *_libraries(config, name)
            outputs[name] = executor.call(stage, models[-1], *judges, *arguments)
            yield name, outputs[name]
            if name != "reward_model":
                models.append(outputs[name])
    judged = _judged(config)
    arguments = judged.rewards, judged.reward_seconds, config.evaluate, *_libraries(config, "evaluate")
    yield "evaluate", executor.call(evaluate, models, start, data, *arguments)


def _judged(config: PosttrainConfig) -> ReinforceConfig | PPOConfig:
    """Return the method whose rewards are those of the comparison."""
    return config.ppo if "ppo" in config.methods else config.reinforce


def _libraries(config: PosttrainConfig, stage: str) -> list[dict[str, str]]:
    """Return the versions of the libraries that decide the output of a stage, as its last argument; empty if none do.

    Raises UserError if one is not installed.
    """
    task, versions = config.dialogs.task, dict[str, str]()
    if stage == "dialogs":
        versions = problem_libraries(task)
    elif stage == "evaluate":
        versions = reward_libraries(task, _judged(config).rewards)
    elif stage in ("reinforce", "ppo") and stage in config.methods:
        versions = reward_libraries(task, getattr(config, stage).rewards)
    return [versions] if versions else []  # only then an argument, and part of the key


POSTTRAIN = Chain(_find_inputs, _stages, get_args(PosttrainStage), _check_stage)
