"""Memory, disk and time that the stages of the pipeline need, predicted before they run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flows.chain import PIPELINE, PipelineInputs
from flows.config import PipelineConfig
from flows.plan import DryRunExecutor, plan
from flows.train_job import FindTraining
from lm.common.errors import UserError
from lm.files.compression import detect_format
from lm.model.config import ModelConfig
from lm.text.sources import Source
from lm.train.config import TrainConfig
from tasks.runs.run_record import make_run
from tasks.runtime.output import Ref
from tasks.runtime.store import Store
from tasks.train import train

# Of one core, in bytes of text a second; docs/scale.md says how they were measured.
_BYTES_PER_SECOND = {"ingest": 296e6, "chunk": 784e6, "count": 354e6, "encode": 221e6}
_SECONDS_PER_PRETOKEN = 3e-6  # of merge, on one core
_PROCESS_BYTES = 4e8  # Python, its libraries and Prefect
_TEXT_BYTES_PER_STORED = 3.0  # of compressed files and tables


@dataclass(frozen=True)
class Forecast:
    """About what a stage needs. None is unknown: an earlier stage decides it, or another machine does the work."""

    stage: str
    memory: float | None = None
    """Bytes at the peak, of this process, or of each training process."""
    disk: float | None = None
    """Bytes of its output."""
    seconds: float | None = None


def plan_with_forecasts(
    config: PipelineConfig, root: str, until: str | None, refresh: Sequence[str]
) -> tuple[list[tuple[str, str]], list[Forecast]]:
    """Return the rows of :func:`flows.plan.plan` for the pipeline, and what each stage that would run needs.

    Times of text follow from its size and the speed of a core, those of a training from a matrix product on this
    machine. Downloads, compilation, evaluations and other programs are not counted.
    """
    executor = FindTraining(make_run(config, root, "plan", tuple(refresh)))
    inputs = PIPELINE.find_inputs(config, executor.run.store)
    list(PIPELINE.run(config, inputs, executor, until))
    forecasts = []
    for stage in PIPELINE.names:
        if stage not in executor.missing:
            continue
        if stage in _BYTES_PER_SECOND:
            forecasts.append(_forecast_text(stage, config, inputs, executor))
        elif stage == "merge":
            forecasts.append(_forecast_merge(inputs))
        elif stage in ("train", "sample"):
            forecasts.append(_forecast_model(stage, config, executor))
        else:
            forecasts.append(Forecast(stage))
    return executor.rows, forecasts


def check_training_memory(config: PipelineConfig, root: str, refresh: Sequence[str]) -> None:
    """Raise UserError before the first stage if the training needs more memory than this machine has; see
    :func:`lm.train.parallel.check_memory`.

    If a budget or another model decides the shape, only the training itself can check it.
    """
    from lm.hardware.device import choose_device
    from lm.train.parallel import check_memory

    if config.budget or config.train.init_from:
        return
    execution = config.execution
    model = _with_vocabulary(config.model, config)
    try:
        check_memory(execution, config.train, model, choose_device(execution.device), execution.processes)
    except UserError:
        # Another machine may have trained this model: then nothing is trained here.
        if (
            not Store(root).list_names(train.name)
            or plan(PIPELINE, config, root, train.name, refresh)[-1][1] != "cached"
        ):
            raise


def _forecast_text(stage: str, config: PipelineConfig, inputs: PipelineInputs, executor: DryRunExecutor) -> Forecast:
    text_bytes, share = _text_bytes([*inputs.train, *inputs.valid]), executor.missing[stage]
    memory, disk = _PROCESS_BYTES, 0.0
    if stage == "ingest":  # plain text is read where it lies
        disk = _text_bytes([source for source in (*inputs.train, *inputs.valid) if not _is_plain(source)])
    elif stage == "count":
        memory += min(config.execution.count_memory << 20, text_bytes)
        disk = 2 * _guess_pretokens(text_bytes)[1]  # of the groups, and their sum
    elif stage == "encode":
        known = _training(config, executor)
        vocab_size = (known[0].vocab_size if known else None) or config.tokenizer.vocab_size
        disk = text_bytes / _guess_bytes_per_token(vocab_size) * (2 if vocab_size <= 1 << 16 else 4)
    seconds = text_bytes / _BYTES_PER_SECOND[stage] / config.execution.workers
    return Forecast(stage, memory, disk * share, seconds * share)


def _forecast_merge(inputs: PipelineInputs) -> Forecast:
    from lm.tokenizer.bpe import training_memory_bytes

    pretokens, size = _guess_pretokens(_text_bytes(inputs.train))
    memory = _PROCESS_BYTES + training_memory_bytes(int(pretokens), int(size))
    return Forecast("merge", memory, 1e6, _SECONDS_PER_PRETOKEN * pretokens)


def _forecast_model(stage: str, config: PipelineConfig, executor: DryRunExecutor) -> Forecast:
    from lm.experiments.speed import guess_flops_per_second
    from lm.hardware.device import choose_device
    from lm.model.flops import flops_per_token, parameter_count
    from lm.model.training_memory import predict_training_memory
    from lm.train.parallel import need_memory

    known, execution = _training(config, executor), config.execution
    if known is None:
        return Forecast(stage)
    model, training = known
    if stage == "sample":
        tokens = len(config.sample.prompts) * config.sample.samples * config.sample.max_new_tokens
        seconds = tokens * flops_per_token(model, training=False) / guess_flops_per_second(execution)
        return Forecast(stage, _PROCESS_BYTES + 4 * parameter_count(model)["total"], 0.0, seconds)
    saved = predict_training_memory(model, 1, training.optimizer)
    disk = (training.keep_checkpoints + 1) * (saved.weights + saved.optimizer_state)  # the best one too
    if execution.train_deployment:
        return Forecast(stage, disk=disk)
    memory = need_memory(execution, training, model, choose_device(execution.device), execution.processes)
    flops = training.steps * training.batch_size * model.context_length * flops_per_token(model)
    seconds = min(flops / guess_flops_per_second(execution), training.max_seconds or math.inf)
    return Forecast(stage, _PROCESS_BYTES + memory, disk, seconds)


def _training(config: PipelineConfig, executor: DryRunExecutor) -> tuple[ModelConfig, TrainConfig] | None:
    """Return the shape of the model and its training; None if an earlier stage decides them and has not run."""
    model, training = config.model, config.train
    if isinstance(executor, FindTraining) and executor.arguments:
        bound = train.bind(*executor.arguments)
        model, training = bound["model"], bound["config"]
    elif config.budget or config.train.init_from:
        return None
    if isinstance(model, Ref) or isinstance(training, Ref):
        return None
    return _with_vocabulary(model, config), training


def _with_vocabulary(model: ModelConfig, config: PipelineConfig) -> ModelConfig:
    return model if model.vocab_size else replace(model, vocab_size=config.tokenizer.vocab_size)


def _is_plain(source: Source) -> bool:
    return not source.url.startswith("demo:") and detect_format(source.url) == ("text", "")


def _text_bytes(sources: Sequence[Source]) -> float:
    """Return about the bytes of text in sources."""
    total = 0.0
    for source in sources:
        is_demo = source.url.startswith("demo:")
        file_format, compression = ("text", "") if is_demo else detect_format(source.url)
        total += source.bytes * (_TEXT_BYTES_PER_STORED if compression or file_format == "parquet" else 1.0)
    return total


def _guess_pretokens(text_bytes: float) -> tuple[float, float]:
    """Return about the number of different pretokens of a text, and their bytes: Heaps' law, as in English prose."""
    pretokens = min(text_bytes / 5, 30 * (text_bytes / 5) ** 0.6)
    return pretokens, 9 * pretokens


def _guess_bytes_per_token(vocab_size: int) -> float:
    """Return about the bytes of English text per token: 1.6 with 300 tokens, 4 with 10,000, 4.6 with 32,000."""
    return max(1.0, 0.45 * math.log2(vocab_size) - 2.1)
