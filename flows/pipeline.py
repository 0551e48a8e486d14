"""The stages of the flow ``pipeline`` in their order, from raw text to sampled text; and the flow.

This is the only description of the order.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, NamedTuple

from flows.config import PipelineConfig, StageName, complete
from flows.plan import DryRunExecutor, Executor, plan
from flows.text import TextInputs, find_text, read_text
from lm.common.errors import UserError
from lm.experiments.config import parse_budget
from lm.model.config import AdapterConfig, ModelConfig
from lm.text.character_tables import tables_identity
from lm.text.config import ChunkConfig
from lm.text.pretokenize import JIEBA, Pattern, jieba_version
from lm.text.sources import Source
from lm.tokenizer.config import TokenizerConfig
from lm.train.config import TrainConfig
from tasks.budget import budget, machine_kind, read_choice
from tasks.chunk import chunk, chunk_group
from tasks.count import count, count_group, count_sum
from tasks.encode import encode, encode_group
from tasks.import_model import find_model_files, import_model
from tasks.merge import merge
from tasks.runs.models import RunModel, resolve_model
from tasks.runtime.inputs import ChunkGroup, TextGroup, read_groups
from tasks.runtime.output import Ref
from tasks.runtime.run_context import RunContext
from tasks.runtime.store import Store
from tasks.sample import sample
from tasks.start_model import read_start
from tasks.train import train

_COUNTS_PER_SUM = 32  # files of counts that are open at the same time

StartModel = RunModel | list[Source]
"""The model that a training starts from: that of a run, or its files, which the first stage imports."""


class PipelineInputs(NamedTuple):
    """What the first stages need."""

    text: TextInputs
    start: StartModel | None
    """The model of ``train.init_from``."""


class ChunkedText(NamedTuple):
    """A text in groups of chunks, and the settings of the stages that read it: those of the configuration, of the model
    that the training starts from, or those that a budget chose."""

    train: list[ChunkGroup]
    valid: list[ChunkGroup]
    special_tokens: list[str]
    pattern: str
    tokenizer: TokenizerConfig
    model: ModelConfig
    training: TrainConfig
    start: tuple[Ref, Ref] | None
    """The model that the training starts from, and its tokenizer."""

    @property
    def tables(self) -> list[str]:
        """What decides the pretokens besides text and pattern: the character tables, and the version of jieba if it is
        used. Only then is it an argument, and part of the keys."""
        return [tables_identity(self.pattern), *([jieba_version()] if self.pattern == JIEBA else [])]


class TrainingInputs(NamedTuple):
    """What the stage ``train`` reads."""

    shards_index: Ref
    train_shards: list[Ref]
    valid_shards: list[Ref]
    tokenizer: Ref
    model: ModelConfig
    config: TrainConfig
    start: Ref | None
    mix: dict[str, dict[str, float | None]] | None
    """Weights and limits of epochs of ``data.mix``."""
    adapter: AdapterConfig | None
    """The adapter to train in place of all weights."""

    @property
    def arguments(self) -> list[Any]:
        """Arguments of the stage. A training from new weights has none for ``start``, in its key neither, nor one on a
        text without a mixture for ``mix``, nor one of all weights for ``adapter``."""
        return list(self)[: 9 if self.adapter else 8 if self.mix else 7 if self.start else 6]


def pipeline_stages(config: PipelineConfig, executor: Executor) -> None:
    """Run all stages."""
    training = prepare_training(config, executor.find_inputs(find_inputs), executor)
    trained = executor.finish(executor.call(train, *training.arguments))
    executor.finish(executor.call(sample, trained, training.tokenizer, config.sample))


def find_inputs(config: PipelineConfig, store: Store) -> PipelineInputs:
    """Find the sources of the text, and the model of ``train.init_from``.

    Raises UserError if one is missing, or if an option conflicts with ``train.init_from``.
    """
    start = None
    if config.train.init_from:
        if config.budget:
            raise UserError("budget chooses a new model, and train.init_from continues one; leave one of them out.")
        if stated := config.stated_fields("tokenizer"):
            raise UserError(
                f"tokenizer.{next(iter(stated))} conflicts with train.init_from: that model has its own tokenizer. "
                "Leave it out."
            )
        start = find_start(config.train.init_from, store)
    return PipelineInputs(find_text(config, store), start)


def find_start(name: str, store: Store) -> StartModel:
    """Find the model ``name``: a run below the root, or a directory of Hugging Face or Meta.

    Raises UserError if there is no such model.
    """
    found = resolve_model(name, store.base)
    return found if isinstance(found, RunModel) else find_model_files(found.directory, store)


def open_start(start: StartModel, executor: Executor) -> tuple[Ref, Ref]:
    """Return the outputs that have the model and its tokenizer. Files are imported first."""
    if isinstance(start, RunModel):
        return start.model.ref, start.tokenizer.ref
    imported = executor.call(import_model, start)
    return imported, imported


def prepare_training(config: PipelineConfig, inputs: PipelineInputs, executor: Executor) -> TrainingInputs:
    """Run all stages before the training."""
    text = prepare_text(config, inputs, executor)
    tokenizer = text.start[1] if text.start else train_tokenizer(text, executor)
    shards = encode_text(config, text, tokenizer, executor)
    start, mix = text.start[0] if text.start else None, config.data.mix_weights or None
    adapter = config.adapter if config.adapter.is_on else None
    return TrainingInputs(*shards, tokenizer, text.model, text.training, start, mix, adapter)


def prepare_text(config: PipelineConfig, inputs: PipelineInputs, executor: Executor) -> ChunkedText:
    """Read the sources, let a budget choose the settings, and cut the text into chunks."""
    separator, specials, pattern = config.data.separator, config.tokenizer.special_tokens, config.tokenizer.pattern
    model_config = config.model
    start: tuple[Ref, Ref] | None = None
    if inputs.start is not None:
        start = open_start(inputs.start, executor)
        executor.finish(start[1])
        specials, pattern, model_config = executor.read(read_start, *start, config.stated_fields("model"), separator)
    # Only if there are other special tokens than the separator, an argument and part of the keys.
    is_ordinary = config.data.special_tokens_in_document == "text" and (start or set(specials) != {separator})
    texts, train_texts, valid_texts = read_text(config, inputs.text, specials if is_ordinary else [], executor)
    chunk_config, tokenizer_config, train_config = config.chunk, config.tokenizer, config.training
    if config.budget:
        amount = parse_budget(config.budget)
        choice = executor.finish(executor.call(budget, texts, amount, machine_kind(config.execution)))
        chosen = executor.read(read_choice, choice, config.tokenizer)
        chunk_config, tokenizer_config, model_config, train_config = chosen
    # Superwords may lie across the places where text can be cut between words.
    cut_pattern = pattern if start else tokenizer_config.document_pattern
    groups = cut_text(train_texts, valid_texts, specials, cut_pattern, chunk_config, executor)
    return ChunkedText(*groups, specials, pattern, tokenizer_config, model_config, train_config, start)


def cut_text(
    train: list[TextGroup],
    valid: list[TextGroup],
    specials: list[str],
    pattern: Pattern,
    config: ChunkConfig,
    executor: Executor,
) -> tuple[list[ChunkGroup], list[ChunkGroup]]:
    """Cut the training and the validation text into chunks, at special tokens or between words of ``pattern``."""
    train_cuts = executor.map(chunk_group, "chunk-train", train, specials, pattern, config)
    valid_cuts = executor.map(chunk_group, "chunk-valid", valid, specials, pattern, config)
    chunks = executor.finish(executor.call(chunk, train_cuts, valid_cuts))
    return (
        executor.read(read_groups, chunks, train, train_cuts, "train"),
        executor.read(read_groups, chunks, valid, valid_cuts, "valid"),
    )


def train_tokenizer(text: ChunkedText, executor: Executor) -> Ref:
    """Count the pretokens, and learn the merges."""
    parts = executor.map(count_group, "count", text.train, text.special_tokens, text.pattern, *text.tables)
    while len(parts) > _COUNTS_PER_SUM:
        batches = [parts[first : first + _COUNTS_PER_SUM] for first in range(0, len(parts), _COUNTS_PER_SUM)]
        parts = executor.map(count_sum, "count-sum", batches)
    counts = executor.finish(executor.call(count, parts))
    # Only superwords are learned from the text itself, and only then is it in the key.
    superword_arguments = [text.train, *text.tables] if text.tokenizer.superwords else []
    return executor.finish(executor.call(merge, counts, text.tokenizer, *superword_arguments))


def encode_text(
    config: PipelineConfig, text: ChunkedText, tokenizer: Ref, executor: Executor
) -> tuple[Ref, list[Ref], list[Ref]]:
    """Encode the text. Return the index, and the shards of the training and the validation text."""
    arguments = tokenizer, config.data.separator, *text.tables
    train_shards = executor.map(encode_group, "encode-train", text.train, *arguments)
    valid_shards = executor.map(encode_group, "encode-valid", text.valid, *arguments)
    named: list[Any] = []  # without a mixture no argument, and not in the key
    if config.data.mix:
        splits = {"train": text.train, "valid": text.valid}
        named = [{split: [group.texts.source for group in groups] for split, groups in splits.items()}]
    index = executor.call(encode, train_shards, valid_shards, tokenizer, config.data.separator, *named)
    return executor.finish(index), train_shards, valid_shards


def find_cached_training(config: PipelineConfig, run: RunContext) -> TrainingInputs | None:
    """Return what the stage ``train`` reads; None if a stage before it has to run first."""
    training = None
    with DryRunExecutor(run, config) as executor:
        training = prepare_training(config, find_inputs(config, run.store), executor)
    return None if executor.missing else training


def check_training_memory(config: PipelineConfig, root: str, refresh: Sequence[str]) -> None:
    """Raise UserError before the first stage if the training needs more memory than this machine has; see
    :func:`lm.train.training_memory.check_memory`.

    If a budget or another model decides the shape, only the training itself can check it.
    """
    from lm.hardware.device import choose_device
    from lm.train.training_memory import check_memory

    if config.budget or config.train.init_from:
        return
    execution = config.execution
    model = replace(config.model, vocab_size=config.model.vocab_size or config.tokenizer.vocab_size)
    try:
        check_memory(execution, config.train, model, choose_device(execution.device), execution.processes)
    except UserError:
        # Another machine may have trained this model: then nothing is trained here.
        is_trained_before = bool(Store(root).list_names(train.name))
        if not is_trained_before or plan(pipeline_stages, config, root, train.name, refresh)[-1][1] != "cached":
            raise


pipeline: Any  # the flow, see __getattr__


@functools.cache
def __getattr__(name: str) -> Any:
    """Make the flow at its first use: the command line imports this module too, and Prefect takes seconds."""
    if name != "pipeline":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from prefect import flow
    from pydantic import BeforeValidator

    from flows.executor import FLOW_OPTIONS, check_device, run_stages

    demo = PipelineConfig.load_preset("demo")
    validator = BeforeValidator(functools.partial(complete, default=demo))

    @flow(name="pipeline", **FLOW_OPTIONS)
    def pipeline(
        config: Annotated[PipelineConfig, validator] = demo,
        root: str = "artifacts",
        until: StageName | None = None,
        refresh: tuple[StageName, ...] = (),
    ) -> dict[str, Any]:
        """Turn raw text into a tokenizer, a trained model and sampled text. Unchanged stages are taken from the cache.

        Args:
            config: Configuration of all stages.
            root: Directory or fsspec URL for all outputs.
            until: Last stage to run; default: all stages.
            refresh: Stages to run again even if they are cached.
        """
        if until in (None, "train", "sample"):  # before hours of other work
            if config.execution.train_deployment:
                from flows.prefect_support.deployments import check_deployment

                check_deployment(config.execution.train_deployment)
            else:
                check_device(config.execution.device)
                check_training_memory(config, root, refresh)
        return run_stages(pipeline_stages, config, root, until, refresh)

    return pipeline
