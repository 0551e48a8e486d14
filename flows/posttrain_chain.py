"""The stages of the flow ``posttrain`` in their order. This is the only description of the order."""

from collections.abc import Iterator
from typing import NamedTuple

from flows.chain import Chain, Executor
from flows.posttrain_config import PosttrainConfig
from flows.run_record import find_model
from lm.text.sources import Source
from tasks.base import base
from tasks.dialogs import dialogs, find_dialog_sources
from tasks.evaluate import evaluate
from tasks.preference import preference
from tasks.reinforce import reinforce
from tasks.runtime.output import Ref
from tasks.runtime.store import Store
from tasks.sft import sft

METHODS = {"sft": sft, "preference": preference, "reinforce": reinforce}


class PosttrainInputs(NamedTuple):
    """What the first stages need."""

    model: Ref
    """Output of a training."""
    tokenizer: Ref
    """Output that has its tokenizer."""
    sources: list[list[Source]]
    """Sources of the dialogs and the problems, see :func:`tasks.dialogs.find_dialog_sources`."""


def _find_inputs(config: PosttrainConfig, store: Store) -> PosttrainInputs:
    model, tokenizer = find_model(store, config.base, is_pretrained=not config.base)
    return PosttrainInputs(model, tokenizer, find_dialog_sources(config.dialogs, store))


def _stages(config: PosttrainConfig, inputs: PosttrainInputs, executor: Executor) -> Iterator[tuple[str, Ref]]:
    start = executor.call(base, inputs.model, inputs.tokenizer)
    yield "base", start
    data = executor.call(dialogs, *inputs.sources, config.dialogs)
    yield "dialogs", data
    models = [start]
    for name, stage in METHODS.items():
        if name in config.methods:
            models.append(executor.call(stage, models[-1], start, data, getattr(config, name)))
            yield name, models[-1]
    yield "evaluate", executor.call(evaluate, models, start, data, config.reinforce.rewards, config.evaluate)


POSTTRAIN = Chain(_find_inputs, _stages)
