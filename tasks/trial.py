"""Stage ``trial``: one training of a sweep. Its output is how it ended: a diverged or refused one counts too."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lm.common.errors import MachineError, Stopped, UserError
from lm.common.processes import run_periodically
from lm.experiments.trial import TrialConfig, find_prune_step, make_result
from lm.hardware.cpu import available_cpus
from lm.train.config import TrainConfig
from tasks.runtime.execution import Execution
from tasks.runtime.output import Output, Ref, open_output, read_output
from tasks.runtime.run_context import Attempt, RunContext
from tasks.runtime.stage import stage
from tasks.train import train

_POLL_SECONDS = 0.2


def _trainings_at_once(execution: Execution) -> int:
    return execution.max_trainings or max(1, available_cpus() // (execution.threads or 1))


@stage(
    "trial",
    at_once=_trainings_at_once,
    is_retried=lambda output: output.manifest["figures"].get("state") == "refused",
)
def trial(
    out: Attempt,
    config: TrialConfig,
    index: Output,
    train_shards: list[Output],
    valid_shards: list[Output],
    tokenizer: Output,
) -> None:
    """Train, or take the trained model from the cache. Write ``trial.json``, see
    :class:`lm.experiments.trial.TrialResult`.

    The model is an output of the stage ``train``, the same that the pipeline makes of this configuration. A point that
    is refused is tried again in each run: another machine may have enough memory.
    """
    from lm.train.tracking import read_metrics

    shards = [[shard.ref for shard in part] for part in (train_shards, valid_shards)]
    mix = (None, config.mix) if config.mix else ()
    arguments = train.bind(index.ref, *shards, tokenizer.ref, config.model, config.train, *mix)
    run = replace(out.run, execution=_share_of_threads(out.run.execution), stopping=threading.Event())
    ((ref, _),) = train.look_up(run, [arguments])
    training: dict[str, Any] | None = None
    divergence: dict[str, Any] | None = None
    refusal = ""
    try:
        with _stopping(out.run, run, ref, config):
            train.materialize(run, arguments)
    except Stopped:
        rows = _read_rows(run, ref)
        if out.run.stopping.is_set() or find_prune_step(rows, config.limits) is None:
            raise
    except MachineError:
        raise
    except UserError as error:
        attempt = _newest_attempt(run, ref)
        if attempt and (attempt / "diverged.json").exists():
            divergence = json.loads((attempt / "diverged.json").read_text(encoding="utf-8"))
        else:  # such as a context that is longer than the text
            refusal = str(error)
        rows = _read_rows(run, ref)
    else:
        model = read_output(run.store, ref)
        training = model.manifest["figures"]
        rows = _without_curve_validations(read_metrics(model.path("metrics.jsonl")), config.train)
    vocab_size = int(index.json("index.json")["vocab_size"])
    result = make_result(config, vocab_size, rows, training, divergence, refusal)
    fields = asdict(result)
    if not config.mix:
        del fields["source_bits_per_byte"]
    out.figures = {name: value for name, value in fields.items() if name != "curve"}
    content = {**fields, "model": ref.key if training else None}
    out.write_json("trial.json", content, indent=1, allow_nan=False)


def _without_curve_validations(rows: list[dict[str, Any]], config: TrainConfig) -> list[dict[str, Any]]:
    """Leave out the validations of ``execution.min_validations``, which a cached training of a pipeline may have: they
    are no ingredient of the key."""

    def is_evaluated(row: dict[str, Any]) -> bool:  # with max_seconds, the clock decides, and so the rows are kept
        return bool(config.max_seconds or row["step"] % config.eval_interval == 0 or row["step"] == config.steps)

    logged = [row for row in rows if is_evaluated(row) or "smoothed_loss" in row]
    return [
        row if is_evaluated(row) else {name: value for name, value in row.items() if not name.startswith("valid_")}
        for row in logged
    ]


def _share_of_threads(execution: Execution) -> Execution:
    """Return the settings of a training that may share this machine with others: ``threads``, or else an equal share.

    Its curve has the evaluations of ``eval_interval`` only: the limits for other trials come from them. A training in
    the main thread is alone: others run in threads, or in the workers of a cluster.
    """
    is_alone = threading.current_thread() is threading.main_thread()
    share = max(1, available_cpus() // (1 if is_alone else _trainings_at_once(execution)))
    return replace(execution, threads=execution.threads or share, min_validations=1)


def _newest_attempt(run: RunContext, ref: Ref) -> Path | None:
    return next(iter(run.store.attempt_directories(*ref)), None)


def _read_rows(run: RunContext, ref: Ref) -> list[dict[str, Any]]:
    """Return the metrics of the newest attempt of a training; no rows if there is no attempt yet."""
    from lm.train.tracking import read_metrics

    attempt = _newest_attempt(run, ref)
    return read_metrics(attempt / "metrics.jsonl") if attempt else []


@contextmanager
def _stopping(outer: RunContext, run: RunContext, ref: Ref, config: TrialConfig) -> Iterator[None]:
    """Stop the training of ``run`` with the whole run, or as soon as it is pruned."""
    earlier = _newest_attempt(run, ref)  # whose last rows a new attempt may train again
    size_read = 0

    def check() -> bool:
        if outer.stopping.is_set() or (config.limits and is_pruned()):
            run.stopping.set()
        return run.stopping.is_set()

    def is_pruned() -> bool:
        nonlocal size_read
        with suppress(FileNotFoundError):  # the training replaces its checkpoints meanwhile
            attempt = _newest_attempt(run, ref)
            size = (attempt / "metrics.jsonl").stat().st_size if attempt and attempt != earlier else size_read
            if size != size_read:
                size_read = size
                return find_prune_step(_read_rows(run, ref), config.limits) is not None
        return False

    with run_periodically(check, _POLL_SECONDS):
        yield


def trained_models(store: Any, trials: list[Ref]) -> list[Ref]:
    """Return the outputs of the stage ``train`` that trials have, and that still exist, in the order of the trials."""
    contents = store.map(lambda ref: read_output(store, ref).json("trial.json"), trials)
    refs = [Ref(train.name, content["model"]) for content in contents if content["model"]]
    return [ref for ref in dict.fromkeys(refs) if open_output(store, ref)]
