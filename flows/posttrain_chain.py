"""The stages of the flow ``posttrain`` in their order. This is the only description of the order."""

from collections.abc import Iterator
from typing import NamedTuple

from flows.chain import Chain, Executor
from flows.models import PRETRAINED_STAGES, DirectoryModel, RunModel, latest_model, resolve_model
from flows.posttrain_config import PosttrainConfig
from lm.text.sources import Source
from tasks.base import base
from tasks.dialogs import dialogs, find_dialog_sources
from tasks.evaluate import evaluate
from tasks.import_model import find_model_files, import_model
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

    model: RunModel | list[Source]
    """The model to start from: that of a run, or its files."""
    sources: list[list[Source]]
    """Sources of the dialogs and the problems, see :func:`tasks.dialogs.find_dialog_sources`."""


def _find_inputs(config: PosttrainConfig, store: Store) -> PosttrainInputs:
    if config.base:
        found: RunModel | DirectoryModel = resolve_model(config.base, store.base)
    else:
        found = latest_model(store, store.base, PRETRAINED_STAGES)
    model = found if isinstance(found, RunModel) else find_model_files(found.directory, store)
    return PosttrainInputs(model, find_dialog_sources(config.dialogs, store))


def _stages(config: PosttrainConfig, inputs: PosttrainInputs, executor: Executor) -> Iterator[tuple[str, Ref]]:
    if isinstance(inputs.model, RunModel):
        model, tokenizer = inputs.model.model.ref, inputs.model.tokenizer.ref
    else:
        model = tokenizer = executor.call(import_model, inputs.model)
    start = executor.call(base, model, tokenizer)
    yield "base", start
    data = executor.call(dialogs, *inputs.sources, config.dialogs)
    yield "dialogs", data
    models, outputs = [start], dict[str, Ref]()
    for name, stage in METHODS.items():
        if name in config.methods:
            judges = [outputs["reward_model"]] if name == "ppo" else []
            outputs[name] = executor.call(stage, models[-1], *judges, start, data, getattr(config, name))
            yield name, outputs[name]
            if name != "reward_model":
                models.append(outputs[name])
    yield "evaluate", executor.call(evaluate, models, start, data, config.reinforce.rewards, config.evaluate)


POSTTRAIN = Chain(_find_inputs, _stages)
