"""The commands of ``textmill`` that start a flow, in this process, with or without Prefect's server.

``textmill NAME`` calls the function ``NAME_command`` with its options. Heavy libraries are imported inside the
functions.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from itertools import groupby
from typing import Any, NamedTuple, get_args

from jsonargparse import Namespace

from flows.config import PipelineConfig, StageName
from flows.curate import CurateConfig, CurateStage, curate_stages
from flows.pipeline import pipeline_stages
from flows.plan import Stages, cached_run, plan
from flows.posttrain import PosttrainConfig, PosttrainStage
from flows.prefect_support.server import is_server_configured, server_for_flow
from flows.prefect_support.signals import GracefulShutdown
from flows.sweep_config import SweepStage, load_sweep, with_base, with_gate, with_trials
from lm.common.errors import UserError, did_you_mean
from lm.experiments.config import parse_budget
from lm.text.patterns import PATTERNS
from tasks.runs.run_record import run_name
from textmill.cli.parser import read_config
from textmill.cli.tables import format_comparison, format_curation, format_profile, format_summary, format_sweep

log = logging.getLogger(__name__)

_MAX_NAMED_OPTIONS = 5


class _Arguments(NamedTuple):
    """What a flow runs."""

    stages: Stages
    config: Any
    until: str | None
    refresh: tuple[Any, ...]
    hint: str = ""
    """Text to print after the summary."""


def _run_flow(
    name: str, read: Callable[[Namespace], _Arguments], summarize: Callable[[dict[str, Any]], str], options: Namespace
) -> None:
    """Run the flow ``name`` and print its summary, or with ``--plan`` what a run would do.

    Prefect is not started if all is cached and no server is configured.
    """
    stages, config, until, refresh, hint = read(options)
    if options.get("plan"):
        print_plan(plan(stages, config, options.root, until, refresh))
        return
    record = None if refresh or is_server_configured() else cached_run(stages, config, options.root, until)
    if not record:
        compilation = _compile_kernels(config) if stages is pipeline_stages else nullcontext()
        with GracefulShutdown(), compilation, server_for_flow():
            flow = getattr(import_module(f"flows.{name}"), name)
            last = {"until": until} if until else {}
            record = flow(config=config, root=options.root, refresh=refresh, **last)
    print(summarize(record) + hint)


def read_pipeline_arguments(options: Namespace) -> _Arguments:
    """Return what the flow ``pipeline`` runs. Warn of options that have no effect."""
    config: PipelineConfig = read_config(PipelineConfig, options)
    until, refresh = _last_and_refreshed(options, StageName)
    config.check_stages(until, refresh)
    if replaced := config.options_replaced_by_budget():
        more = f" and {len(replaced) - _MAX_NAMED_OPTIONS} more" if len(replaced) > _MAX_NAMED_OPTIONS else ""
        named = ", ".join(replaced[:_MAX_NAMED_OPTIONS])
        log.warning("The budget chooses %s%s: what you set has no effect.", named, more)
    hint = ""
    if until in (None, "train", "sample") and config.has_demo_model():
        hint = (
            f"\n\nThis is the demo's model: {config.model.num_layers} layers of {config.model.d_model}, trained for "
            f"{config.train.steps} steps. For one that suits your text, run the same command with --budget 30m."
        )
    return _Arguments(pipeline_stages, config, until, refresh, hint)


def _read_posttrain_arguments(options: Namespace) -> _Arguments:
    from flows.posttrain import posttrain_stages

    config: PosttrainConfig = read_config(PosttrainConfig, options)
    until, refresh = _last_and_refreshed(options, PosttrainStage)
    config.check_stages(until, refresh)
    hint = ""
    if config.has_demo_problems():
        hint = (
            f"\n\nThe problems of the preset demo, {config.dialogs.task}, are mixed into your dialogs. For your "
            "dialogs alone, run the same command with --preset dialogs."
        )
    return _Arguments(posttrain_stages, config, until, refresh, hint)


def _read_curate_arguments(options: Namespace) -> _Arguments:
    config: CurateConfig = read_config(CurateConfig, options)
    until, refresh = _last_and_refreshed(options, CurateStage)
    config.check_stages(until, refresh)
    return _Arguments(curate_stages, config, until, refresh)


def _read_sweep_arguments(options: Namespace) -> _Arguments:
    from flows.sweep import sweep_stages

    config = with_base(load_sweep(options.get("sweep", "speedrun"), options.size), read_config(PipelineConfig, options))
    config = with_gate(config, options.get("variant", ""), options.get("seeds"))
    refresh = _stage_names(options.refresh, SweepStage)
    config.check_stages(None, refresh)
    return _Arguments(sweep_stages, config, None, with_trials(refresh) if options.plan else refresh)


# Not functions of their own: each would be a frame between main and the flow.
run_command = partial(_run_flow, "pipeline", read_pipeline_arguments, format_summary)
posttrain_command = partial(_run_flow, "posttrain", _read_posttrain_arguments, format_summary)
curate_command = partial(_run_flow, "curate", _read_curate_arguments, format_curation)
sweep_command = speedrun_command = partial(_run_flow, "sweep", _read_sweep_arguments, format_sweep)


def profile_command(options: Namespace) -> None:
    """Measure training steps and print a summary. Prefect is not started if the stages before are cached and no server
    is configured."""
    config, root = read_config(PipelineConfig, options), options.root
    if not is_server_configured() and (record := cached_run(pipeline_stages, config, root, "encode")):
        from flows.profile import profile_training

        name = run_name("profile", record["name"].rpartition("-")[2])
        result = profile_training(config, root, name, options.steps, options.out)
    else:
        with GracefulShutdown(), server_for_flow():
            from flows.profile import profile

            result = profile(config, root, options.steps, options.out)
    print(format_profile(result))


def tokenizers_command(options: Namespace) -> None:
    """Compare tokenizers and print their figures. Prefect is not started if nothing is trained and no server is
    configured. Raises UserError if options of the trainings are missing or have no effect."""
    from flows.compare_tokenizers import Trainings, compare

    if options.train_flops and not options.train_text:
        raise UserError("--train_flops trains models; name the text to train on, such as --train_text train.txt.")
    if not options.train_flops and (options.train_text or options.seeds > 1):
        raise UserError("--train_text and --seeds are for trainings; give their size too, such as --train_flops 1e14.")
    trainings = Trainings(options.train_text, options.train_flops, options.seeds) if options.train_flops else None
    arguments = options.tokenizers, options.text, options.root, options.out
    if trainings or is_server_configured():
        with GracefulShutdown(), server_for_flow():
            from flows.compare_tokenizers import tokenizers

            result = tokenizers(*arguments, trainings)
    else:
        result = compare(*arguments)
    print(format_comparison(result))


@contextmanager
def _compile_kernels(config: PipelineConfig) -> Iterator[None]:
    """Compile kernels while Prefect starts and text is ingested. Before a budget measures steps, wait for the end."""
    from lm.kernels.disk_cache import compile_in_background

    names = {pattern: name for name, pattern in PATTERNS.items()}
    id_bits = 16 if config.tokenizer.vocab_size <= 1 << 16 else 32
    compiler = compile_in_background(names.get(config.tokenizer.pattern, "gpt2"), id_bits)
    try:
        if compiler and config.budget and parse_budget(config.budget).unit == "seconds":
            log.info("Compiling kernels for this CPU, once. The steps that the budget measures wait for it.")
            compiler.wait()
        yield
    finally:
        if compiler:
            compiler.terminate()


def print_plan(rows: list[tuple[str, str]]) -> None:
    """Print what a run would do with each stage."""
    width = max(len(name) for name, _ in rows)
    for (name, action), group in groupby(rows):  # the points of a sweep have one name
        count = len(list(group))
        print(f"{name:<{width}}  {action}{f' ({count} times)' if count > 1 else ''}")


def _last_and_refreshed(options: Namespace, stages: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the last stage to run, None for all, and the stages to run again."""
    until, refresh = (_stage_names(text, stages) for text in (options.until, options.refresh))
    if len(until) > 1:
        raise UserError(f"--until takes one stage, the last to run; it got {', '.join(until)}.")
    return until[0] if until else None, refresh


def _stage_names(text: str, stages: Any) -> tuple[Any, ...]:
    """Parse a comma-separated list of ``stages``, a Literal. Raise UserError for an unknown stage."""
    known = get_args(stages)
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise UserError(f"There is no stage {name!r}{did_you_mean(name, known)}. Stages: {', '.join(known)}.")
    return tuple(names)
