"""The subcommands of ``textmill``, one function each. Heavy libraries are imported inside the functions."""

import logging
import os
import shlex
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

from jsonargparse import Namespace

from flows.chain import PIPELINE
from flows.config import PipelineConfig, StageName, has_demo_model, options_replaced_by_budget
from flows.forecast import plan_with_forecasts
from flows.plan import cached_run, plan
from flows.posttrain_config import PosttrainConfig, PosttrainStage, has_demo_problems
from flows.sweep_config import SweepStage, load_sweep, with_base, with_trials
from lm.common.errors import UserError, did_you_mean
from lm.eval.config import EvaluationConfig, TeachConfig
from lm.experiments.budget import parse_budget
from lm.inference.config import SampleConfig
from lm.text.patterns import PATTERNS
from tasks.runs.models import DirectoryModel, RunModel, resolve_model
from tasks.runs.run_record import absolute_root, run_name
from tasks.runtime.root_lock import own_root
from tasks.runtime.store import Store
from textmill.cli.console import log_to_console
from textmill.cli.local_run import is_server_configured, run_flow, run_pipeline
from textmill.cli.summary import (
    format_comparison,
    format_evaluation,
    format_forecasts,
    format_profile,
    format_sample,
    format_summary,
    format_sweep,
    format_teaching,
)

log = logging.getLogger(__name__)

_MAX_NAMED_OPTIONS = 5


def run_command(options: Namespace) -> None:
    """Run the pipeline and print a summary. Prefect is not started if all is cached and no server is configured."""
    arguments = config, root, until, refresh = _pipeline_arguments(options)
    log_to_console()
    _warn_of_replaced_options(config)
    record = None if refresh or is_server_configured() else cached_run(PIPELINE, config, root, until)
    if not record:
        from flows.prefect_support.signals import GracefulShutdown
        from lm.kernels.disk_cache import compile_in_background

        names = {pattern: name for name, pattern in PATTERNS.items()}
        pattern = names.get(config.tokenizer.pattern, "gpt2")
        id_bits = 16 if config.tokenizer.vocab_size <= 1 << 16 else 32
        compiler = compile_in_background(pattern, id_bits)  # while Prefect starts and text is ingested
        try:
            with GracefulShutdown():
                if compiler and config.budget and parse_budget(config.budget).unit == "seconds":
                    log.info("Compiling kernels for this CPU, once. The steps that the budget measures wait for it.")
                    compiler.wait()
                record = run_pipeline(*arguments)
        finally:
            if compiler:
                compiler.terminate()
    print(format_summary(record))
    if "train" in record["stages"] and has_demo_model(config):
        print(
            f"\nThis is the demo's model: {config.model.num_layers} layers of {config.model.d_model}, trained for "
            f"{config.train.steps} steps. For one that suits your text, run the same command with --budget 30m."
        )


def plan_command(options: Namespace) -> None:
    """Print what a run would do, and what its stages need."""
    arguments = _pipeline_arguments(options)
    log_to_console()
    _warn_of_replaced_options(arguments[0])
    rows, forecasts = plan_with_forecasts(*arguments)
    _print_plan(rows)
    if forecasts:
        print(format_forecasts(forecasts))


def _warn_of_replaced_options(config: PipelineConfig) -> None:
    if replaced := options_replaced_by_budget(config):
        more = f" and {len(replaced) - _MAX_NAMED_OPTIONS} more" if len(replaced) > _MAX_NAMED_OPTIONS else ""
        named = ", ".join(replaced[:_MAX_NAMED_OPTIONS])
        log.warning("The budget chooses %s%s: what you set has no effect.", named, more)


def posttrain_command(options: Namespace) -> None:
    """Run the post-training and print a summary, or with ``--plan`` what a run would do."""
    from flows.posttrain_chain import POSTTRAIN

    config = PosttrainConfig(**{name: options[name] for name in PosttrainConfig.__dataclass_fields__})
    until, refresh = _last_and_refreshed(options, PosttrainStage)
    POSTTRAIN.check(config, until, refresh)
    log_to_console()
    if options.plan:
        _print_plan(plan(POSTTRAIN, config, options.root, until, refresh))
        return
    record = None if refresh or is_server_configured() else cached_run(POSTTRAIN, config, options.root, until)
    if not record:
        from flows.posttrain import posttrain
        from flows.prefect_support.signals import GracefulShutdown

        with GracefulShutdown():
            record = run_flow(posttrain, config, options.root, until, refresh)
    print(format_summary(record))
    if has_demo_problems(config):
        print(
            f"\nThe problems of the preset demo, {config.dialogs.task}, are mixed into your dialogs. For your dialogs "
            "alone, run the same command with --preset dialogs."
        )


def sweep_command(options: Namespace) -> None:
    """Run a sweep and print its table, or with ``--plan`` what a run would do."""
    from flows.sweep_chain import SWEEP

    config = with_base(load_sweep(options.sweep, options.size), _pipeline_config(options))
    refresh = _stage_names(options.refresh, SweepStage)
    SWEEP.check(config, None, refresh)
    log_to_console()
    if options.plan:
        _print_plan(plan(SWEEP, config, options.root, None, with_trials(refresh)))
        return
    record = None if refresh or is_server_configured() else cached_run(SWEEP, config, options.root, None)
    if not record:
        from flows.prefect_support.signals import GracefulShutdown
        from flows.sweep import sweep

        with GracefulShutdown():
            record = run_flow(sweep, config, options.root, refresh)
    print(format_sweep(record))


def _print_plan(rows: list[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in rows)
    for (name, action), group in groupby(rows):  # the points of a sweep have one name
        count = len(list(group))
        print(f"{name:<{width}}  {action}{f' ({count} times)' if count > 1 else ''}")


def train_job_command(options: Namespace) -> None:
    """Write the job of the training to the root, and print how to run it."""
    from flows.train_job import write_train_job

    log_to_console()
    url = write_train_job(_pipeline_config(options), options.root)
    print(
        f"{url}\nOn one machine:    PYTHONSAFEPATH=1 torchrun --nproc-per-node GPUS -m lm.train {url}\n"
        "On each of several: PYTHONSAFEPATH=1 torchrun --nnodes MACHINES --nproc-per-node GPUS --rdzv-backend c10d "
        f"--rdzv-endpoint HOST:29400 -m lm.train {url}\n"
        f"Then textmill run --root {shlex.quote(options.root)} with the same options takes the trained model."
    )


def profile_command(options: Namespace) -> None:
    """Measure training steps and print a summary. Prefect is not started if the stages before are cached and no server
    is configured."""
    config, root = _pipeline_config(options), options.root
    log_to_console()
    if not is_server_configured() and (record := cached_run(PIPELINE, config, root, "encode")):
        from flows.profile_training import profile_training

        name = run_name("profile", record["name"].rpartition("-")[2])
        result = profile_training(config, root, name, options.steps, options.out)
    else:
        from flows.prefect_support.signals import GracefulShutdown
        from flows.profile import profile

        with GracefulShutdown():
            result = run_flow(profile, config, root, options.steps, options.out)
    print(format_profile(result))


def sample_command(options: Namespace) -> None:
    """Print samples from a model."""
    from lm.inference.completion import complete

    config = _sample_config(options)
    config = replace(config, prompts=options.prompt or config.prompts)
    model = resolve_model(options.model, options.root)
    for sample in complete(*model.load_for_inference(options.device, options.quantize), config):
        print(format_sample(sample.prompt, sample.text))


def chat_command(options: Namespace) -> None:
    """Chat with a model in the terminal."""
    from textmill.cli.chat import chat

    model = resolve_model(options.model, options.root)
    chat(*model.load_for_inference(options.device, options.quantize), _sample_config(options), options.system)


def serve_command(options: Namespace) -> None:
    """Serve a model over HTTP until Ctrl-C."""
    from textmill.server.app import serve

    if not options.host:
        raise UserError("--host is empty. 127.0.0.1 is this machine alone, 0.0.0.0 all its addresses.")
    model = resolve_model(options.model, options.root)
    key = options.api_key if options.api_key is not None else os.environ.get("TEXTMILL_API_KEY")
    serve(
        model,
        options.host,
        options.port,
        options.max_batch_size,
        options.device,
        prefix_cache_bytes=options.prefix_cache_mb * 10**6,
        api_key=key,
        max_requests_per_client=options.max_requests_per_client,
        speculative_tokens=options.speculative_tokens,
        quantization=options.quantize,
    )


def evaluate_command(options: Namespace) -> None:
    """Evaluate a model on a task, and print its figures."""
    from flows.evaluate import evaluate_model

    log_to_console()
    config = EvaluationConfig(**{name: options[name] for name in EvaluationConfig.__dataclass_fields__})
    place = options.root, options.device, options.model_name, options.out
    result = evaluate_model(options.model, config, *place, quantization=options.quantize)
    print(format_evaluation(result))


def teach_command(options: Namespace) -> None:
    """Ask another model for answers to prompts, and print how many are kept for fine-tuning."""
    from flows.teach import teach

    log_to_console()
    config = TeachConfig(**{name: options[name] for name in TeachConfig.__dataclass_fields__})
    print(format_teaching(teach(config)))


def tokenizers_command(options: Namespace) -> None:
    """Compare tokenizers and print their figures. Prefect is not started if no server is configured."""
    from flows.tokenizer_comparison import compare

    log_to_console()
    arguments = options.tokenizers, options.text, options.root, options.out
    if is_server_configured():
        from flows.tokenizers import tokenizers

        result = run_flow(tokenizers, *arguments)
    else:
        result = compare(*arguments)
    print(format_comparison(result))


def export_command(options: Namespace) -> None:
    """Write a model as a Hugging Face directory, or with ``--gguf`` as a file for llama.cpp."""
    from lm.checkpoint.gguf import save_gguf
    from lm.checkpoint.hugging_face import save_hugging_face
    from lm.checkpoint.lost_settings import warn_of_lost_settings
    from lm.tokenizer.text_tokenizer import require_byte_level
    from textmill.runs.model_card import training_details

    log_to_console()
    resolved = resolve_model(options.model, options.root)
    model, tokenizer = resolved.load("cpu")
    tokenizer, path = require_byte_level(tokenizer, resolved.name), Path(options.path)
    if options.gguf:
        save_gguf(model, tokenizer, path, options.gguf)
    else:
        details = training_details(resolved) if isinstance(resolved, RunModel) else ""
        save_hugging_face(model, tokenizer, path, details)
    if isinstance(resolved, DirectoryModel):
        warn_of_lost_settings(resolved.directory, tokenizer)
    reader = "llama.cpp" if options.gguf else "transformers' from_pretrained"
    print(f"Exported to {path}. {reader} can load it.")


def verify_command(options: Namespace) -> int:
    """Print the damaged, unfinished and orphaned files under a root. Return 1 if files are damaged."""
    from tasks.maintenance.verify import verify

    counts: Counter[str] = Counter()
    for finding in verify(Store(absolute_root(options.root))):
        counts[finding.kind] += 1
        print(f"{finding.kind:<10}  {finding.path}: {finding.problem}")
    if not counts:
        print(f"All outputs under {options.root} are intact.")
        return 0
    print(", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())) + f" under {options.root}.")
    if counts["damaged"]:
        print("Damaged outputs are never used: the next run that needs them makes them again.")
    if counts.keys() - {"damaged"}:
        print("Orphaned files are never used. A training may go on from unfinished ones.")
        print("textmill gc lists the files that it can delete.")
    return 1 if counts["damaged"] else 0


def gc_command(options: Namespace) -> None:
    """List the files below a root that no run needs. With ``--delete``, delete them."""
    from tasks.maintenance.gc import delete, find_garbage

    store = Store(absolute_root(options.root))
    with own_root(store) if options.delete else nullcontext(lambda: None) as check_ownership:
        findings, lines = find_garbage(store), []
        for finding in findings:
            check_ownership()
            is_kept = options.delete and not delete(store, finding)
            reason = "kept, a training uses it" if is_kept else finding.problem
            lines.append(f"{finding.bytes / 1e6:>10,.1f} MB  {finding.path}: {reason}")
    for line in lines:  # not before all is deleted: whoever reads it may stop
        print(line)
    total = f"{len(findings)} in all, {sum(finding.bytes for finding in findings) / 1e6:,.1f} MB"
    if options.delete or not findings:
        print(f"{total}.")
    else:
        print(f"{total}. Nothing is deleted yet. To delete, add --delete while no run uses {options.root}.")
        print("To delete the outputs of a run too, first delete its record in runs/; of the latest, latest.json too.")


def up_command(options: Namespace) -> None:
    """Start Prefect's server, the deployments and a worker."""
    from flows.prefect_support.local_stack import start_local_stack

    start_local_stack(options.port)


def _pipeline_arguments(options: Namespace) -> tuple[PipelineConfig, str, StageName | None, tuple[StageName, ...]]:
    config, (until, refresh) = _pipeline_config(options), _last_and_refreshed(options, StageName)
    PIPELINE.check(config, until, refresh)
    return config, options.root, until, refresh


def _pipeline_config(options: Namespace) -> PipelineConfig:
    return PipelineConfig(**{name: options[name] for name in PipelineConfig.__dataclass_fields__})


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


def _sample_config(options: Namespace) -> SampleConfig:
    return SampleConfig(**{name: options[name] for name in SampleConfig.__dataclass_fields__ if name in options})
