"""The stages of the flow ``posttrain`` in their order, from a model that continues text to one that does what it is
asked; and the flow.

This is the only description of the order.
"""

import functools
from typing import Annotated, Any

from flows.config import complete
from flows.pipeline import find_start, open_start
from flows.plan import Executor
from flows.posttrain_config import PosttrainConfig, PosttrainStage
from tasks.base import base
from tasks.dialogs import dialogs, find_dialog_sources
from tasks.evaluate import evaluate
from tasks.posttrain import ppo, preference, reinforce, reward_model, sft
from tasks.runs.models import PRETRAINED_STAGES, latest_model
from tasks.runtime.output import Ref
from tasks.runtime.store import Store

METHODS = {"sft": sft, "preference": preference, "reward_model": reward_model, "reinforce": reinforce, "ppo": ppo}


def posttrain_stages(config: PosttrainConfig, executor: Executor) -> None:
    """Run all stages."""
    model, sources = executor.find_inputs(_find_inputs)
    start = executor.finish(executor.call(base, *open_start(model, executor)))
    data = executor.finish(executor.call(dialogs, *sources, config.dialogs, *config.libraries("dialogs")))
    models, outputs = [start], dict[str, Ref]()
    for name, stage in METHODS.items():
        if name in config.methods:
            judges = [outputs["reward_model"]] if name == "ppo" else []
            arguments = start, data, getattr(config, name), *config.libraries(name)
            outputs[name] = executor.finish(executor.call(stage, models[-1], *judges, *arguments))
            if name != "reward_model":
                models.append(outputs[name])
    rewards = config.judged.rewards, config.judged.reward_seconds
    executor.finish(
        executor.call(evaluate, models, start, data, *rewards, config.evaluate, *config.libraries("evaluate"))
    )


def _find_inputs(config: PosttrainConfig, store: Store) -> tuple[Any, Any]:
    """Return the model to start from, and the sources of the dialogs and the problems."""
    model = find_start(config.base, store) if config.base else latest_model(store, store.base, PRETRAINED_STAGES)
    return model, find_dialog_sources(config.dialogs, store)


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
