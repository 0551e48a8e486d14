"""The stages of the flow ``posttrain`` in their order. This is the only description of the order."""

from collections.abc import Iterator
from typing import NamedTuple, get_args

from flows.chain import Chain, Executor
from flows.models import PRETRAINED_STAGES, latest_model
from flows.posttrain_config import PosttrainConfig, PosttrainStage
from flows.start_model import StartModel, find_start, open_start
from lm.common.errors import UserError
from lm.eval.tasks import problem_libraries, reward_libraries
from lm.text.sources import Source
from tasks.base import base
from tasks.dialogs import dialogs, find_dialog_sources
from tasks.evaluate import evaluate
from tasks.ppo import ppo
from tasks.preference import preference
from tasks.reinforce import reinforce
from tasks.reward_model import reward_model
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


def _find_inputs(config: PosttrainConfig, store: Store) -> PosttrainInputs:
    model = find_start(config.base, store) if config.base else latest_model(store, store.base, PRETRAINED_STAGES)
    return PosttrainInputs(model, find_dialog_sources(config.dialogs, store))


def _stages(config: PosttrainConfig, inputs: PosttrainInputs, executor: Executor) -> Iterator[tuple[str, Ref]]:
    task = config.dialogs.task
    judged = config.ppo if "ppo" in config.methods else config.reinforce  # its rewards are those of the comparison
    # Before the first stage: a library that is missing is told now, not after the trainings before it.
    problem_versions, judge_versions = _if_any(problem_libraries(task)), _if_any(reward_libraries(task, judged.rewards))
    reward_versions: dict[str, list[dict[str, str]]] = {
        name: _if_any(reward_libraries(task, getattr(config, name).rewards))
        for name in ("reinforce", "ppo")
        if name in config.methods
    }
    start = executor.call(base, *open_start(inputs.model, executor.call))
    yield "base", start
    data = executor.call(dialogs, *inputs.sources, config.dialogs, *problem_versions)
    yield "dialogs", data
    models, outputs = [start], dict[str, Ref]()
    for name, stage in METHODS.items():
        if name in config.methods:
            judges, versions = [outputs["reward_model"]] if name == "ppo" else [], reward_versions.get(name, [])
            outputs[name] = executor.call(stage, models[-1], *judges, start, data, getattr(config, name), *versions)
            yield name, outputs[name]
            if name != "reward_model":
                models.append(outputs[name])
    rewards = judged.rewards, judged.reward_seconds
    yield "evaluate", executor.call(evaluate, models, start, data, *rewards, config.evaluate, *judge_versions)


def _if_any(libraries: dict[str, str]) -> list[dict[str, str]]:
    return [libraries] if libraries else []  # only then an argument, and part of the key


POSTTRAIN = Chain(_find_inputs, _stages, get_args(PosttrainStage), _check_stage)
