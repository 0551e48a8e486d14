"""Memory, disk and time that the stages of the pipeline need, predicted before they run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flows.config import PipelineConfig
from flows.pipeline import pipeline_stages
from flows.plan import DryRunExecutor, dry_run
from flows.text import TextInputs
from lm.files.compression import detect_format
from lm.model.config import ModelConfig
from lm.text.sources import Source
from lm.train.config import TrainConfig
from tasks.train import train

# Of one core, in bytes of text a second; docs/scale.md and docs/curation.md say how they were measured.
_CURATION_BYTES_PER_SECOND = {"filter": 25e6, "deduplicate": 60e6, "repeats": 20e6, "decontaminate": 30e6}
_BYTES_PER_SECOND = {"ingest": 296e6, "chunk": 784e6, "count": 354e6, "encode": 221e6} | _CURATION_BYTES_PER_SECOND
_LANGUAGE_BYTES_PER_SECOND = 7e6  # of a filter that identifies languages
_CURATION_BYTES = 2e8  # what its stages hold
_PROCESS_BYTES = 4e8  # Python, its libraries and Prefect


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
    executor = dry_run(pipeline_stages, config, root, until, refresh)
    inputs: TextInputs = executor.inputs.text
    known = _find_training(config, executor)
    forecasts = []
    for stage in (name for name in config.STAGES if name in executor.missing):
        if stage in _BYTES_PER_SECOND:
            vocab_size = (known[0].vocab_size if known else None) or config.tokenizer.vocab_size
            forecasts.append(_forecast_text(stage, config, inputs, executor.missing[stage], vocab_size))
        elif stage == "merge":
            forecasts.append(_forecast_merge(*_guess_pretokens(_text_bytes(inputs.train))))
        elif stage in ("train", "sample") and known:
            forecasts.append(_forecast_model(stage, config, *known))
        else:
            forecasts.append(Forecast(stage))
    return executor.rows, forecasts


def _find_training(config: PipelineConfig, executor: DryRunExecutor) -> tuple[ModelConfig, TrainConfig] | None:
    """Return the shape of the model and its training; None if an earlier stage decides them and has not run."""
    if "train" in executor.arguments:
        bound = train.bind(*executor.arguments["train"])
        model, training = bound["model"], bound["config"]
    elif config.budget or config.train.init_from:
        return None
    else:
        model, training = config.model, config.train
    return replace(model, vocab_size=model.vocab_size or config.tokenizer.vocab_size), training


def _forecast_text(stage: str, config: PipelineConfig, inputs: TextInputs, share: float, vocab_size: int) -> Forecast:
    """``share``: of the groups that would run."""
    sources = [*inputs.train, *inputs.valid]
    text_bytes, memory, disk = _text_bytes(sources), _PROCESS_BYTES, 0.0
    if stage == "ingest":  # plain text is read where it lies
        disk = _text_bytes([source for source in sources if _find_format(source) != ("text", "")])
    elif stage in _CURATION_BYTES_PER_SECOND:  # at most: an earlier stage may leave less text
        memory += _CURATION_BYTES
        disk = text_bytes
    elif stage == "count":
        memory += min(config.execution.count_memory << 20, text_bytes)
        disk = 2 * _guess_pretokens(text_bytes)[1]  # of the groups, and their sum
    elif stage == "encode":
        bytes_per_token = max(1.0, 0.45 * math.log2(vocab_size) - 2.1)  # of English; 300 ids: 1.6; 10k: 4; 32k: 4.6
        disk = text_bytes / bytes_per_token * (2 if vocab_size <= 1 << 16 else 4)
    has_languages = stage == "filter" and config.filter.languages
    seconds = text_bytes / (_LANGUAGE_BYTES_PER_SECOND if has_languages else _BYTES_PER_SECOND[stage])
    seconds /= config.execution.workers
    return Forecast(stage, memory, disk * share, seconds * share)


def _forecast_merge(pretokens: float, size: float) -> Forecast:
    from lm.tokenizer.bpe import training_memory_bytes

    memory = _PROCESS_BYTES + training_memory_bytes(int(pretokens), int(size))
    return Forecast("merge", memory, 1e6, 3e-6 * pretokens)  # seconds on one core


def _forecast_model(stage: str, config: PipelineConfig, model: ModelConfig, training: TrainConfig) -> Forecast:
    from lm.experiments.speed import guess_flops_per_second
    from lm.hardware.device import choose_device
    from lm.model.flops import flops_per_token, parameter_count
    from lm.train.adapter_memory import predict_adapter_memory
    from lm.train.training_memory import need_memory, predict_training_memory

    execution = config.execution
    if stage == "sample":
        tokens = len(config.sample.prompts) * config.sample.samples * config.sample.max_new_tokens
        seconds = tokens * flops_per_token(model, training=False) / guess_flops_per_second(execution)
        return Forecast(stage, _PROCESS_BYTES + 4 * parameter_count(model)["total"], 0.0, seconds)
    if config.adapter.is_on:
        learned = predict_adapter_memory(1, execution, training, model, config.adapter, "none", 1, "cpu")
        saved_bytes = learned.adapter + learned.optimizer_state
    else:
        saved = predict_training_memory(1, execution, training, model, "none", 1, "cpu")
        saved_bytes = saved.weights + saved.optimizer_state
    disk = (training.keep_checkpoints + 1) * saved_bytes  # the best one too
    if execution.train_deployment:
        return Forecast(stage, disk=disk)
    device, processes = choose_device(execution.device), execution.processes
    memory = need_memory(execution, training, model, device, processes, config.adapter)
    flops = training.steps * training.batch_size * model.context_length * flops_per_token(model)
    seconds = min(flops / guess_flops_per_second(execution), training.max_seconds or math.inf)
    return Forecast(stage, _PROCESS_BYTES + memory, disk, seconds)


def _find_format(source: Source) -> tuple[str, str]:
    return ("demo", "") if source.url.startswith("demo:") else detect_format(source.url)


def _text_bytes(sources: Sequence[Source]) -> float:
    """Return about the bytes of text in sources."""
    total = 0.0
    for source in sources:
        file_format, compression = _find_format(source)
        total += source.bytes * (3.0 if compression or file_format == "parquet" else 1.0)
    return total


def _guess_pretokens(text_bytes: float) -> tuple[float, float]:
    """Return about the number of different pretokens of a text, and their bytes: Heaps' law, as in English prose."""
    pretokens = min(text_bytes / 5, 30 * (text_bytes / 5) ** 0.6)
    return pretokens, 9 * pretokens
