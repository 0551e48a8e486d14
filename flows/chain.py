"""The stages of the flow ``pipeline`` in their order. This is the only description of the order."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, get_args

from flows.config import PipelineConfig, StageName, load_preset
from flows.start_model import StartModel, check_continued, find_start, open_start, stated_fields
from lm.common.errors import UserError
from lm.experiments.budget import parse_budget
from lm.model.config import ModelConfig
from lm.text.character_tables import tables_identity
from lm.text.held_out import valid_fraction
from lm.text.ingest import group_sources
from lm.text.pretokenize import JIEBA, jieba_version
from lm.text.sources import Source
from tasks.budget import budget, machine_kind, read_choice
from tasks.chunk import chunk, chunk_group
from tasks.count import count, count_group, count_sum
from tasks.encode import encode, encode_group
from tasks.ingest import find_sources, ingest, ingest_group
from tasks.merge import merge
from tasks.runtime.chunk_input import read_groups
from tasks.runtime.output import Ref
from tasks.runtime.stage import Stage
from tasks.runtime.store import Store
from tasks.runtime.text_groups import read_text_groups
from tasks.sample import sample
from tasks.start_model import read_start
from tasks.train import train

_COUNTS_PER_SUM = 32  # files of counts that are open at the same time


class Executor(Protocol):
    """Something that returns the outputs of stages: it runs the stages, or only looks in the cache."""

    def call(self, stage: Stage, *arguments: Any, title: str = "") -> Ref:
        """Return the output of a stage. ``title`` names this call for people; empty: the name of the stage."""

    def read(self, function: Callable[..., Sequence[Any]], *arguments: Any) -> Sequence[Any]:
        """Return the items of a mapped stage: what a function of the store and these arguments reads from outputs."""

    def map(self, stage: Stage, title: str, items: Sequence[Any], *arguments: Any) -> list[Ref]:
        """Return the outputs of a stage for all items, each the first argument of a call."""


@dataclass(frozen=True)
class Chain:
    """The stages of a flow."""

    find_inputs: Callable[[Any, Store], Any]
    """Returns what the first stages need, from the flow's config and the store."""
    stages: Callable[[Any, Any, Executor], Iterator[tuple[str, Ref]]]
    """Yields the name and the output of each stage when it is done, from config and inputs."""
    names: tuple[str, ...]
    """Names of the stages in their order."""
    check_stage: Callable[[Any, str | None], None]
    """Raises UserError if a run with this config has no stage of a name; None is any."""

    def check(self, config: Any, until: str | None, refresh: Sequence[str]) -> None:
        """Raise UserError if a run with this config up to ``until`` does not reach a stage of ``refresh``."""
        self.check_stage(config, until)
        for name in refresh:
            self.check_stage(config, name)
            if until and self.names.index(name) > self.names.index(until):
                raise UserError(f"To refresh {name} has no effect, because the run ends with {until}.")

    def run(self, config: Any, inputs: Any, executor: Executor, until: str | None) -> Iterator[tuple[str, Ref]]:
        """Yield the name and the output of each stage, up to and including ``until`` (None: all stages)."""
        self.check_stage(config, until)
        for name, ref in self.stages(config, inputs, executor):
            yield name, ref
            if name == until:
                return


class PipelineInputs(NamedTuple):
    """What the first stages need."""

    train: list[Source]
    valid: list[Source]
    start: StartModel | None
    """The model of ``train.init_from``."""


def _check_stage(config: PipelineConfig, name: str | None) -> None:
    if name == budget.name and not config.budget:
        raise UserError("There is no budget to choose a configuration for; give one, such as --budget 30m.")
    if name in (count.name, merge.name) and config.train.init_from:
        raise UserError(f"There is no stage {name}: the tokenizer is that of the model of train.init_from.")


def _find_inputs(config: PipelineConfig, store: Store) -> PipelineInputs:
    start = None
    if config.train.init_from:
        check_continued(config)
        start = find_start(config.train.init_from, store)
    return PipelineInputs(*find_sources(config.data, store), start)


def _stages(config: PipelineConfig, inputs: PipelineInputs, executor: Executor) -> Iterator[tuple[str, Ref]]:
    specials: Any = config.tokenizer.special_tokens
    pattern: Any = config.tokenizer.pattern
    separator = config.data.separator

    train_sources, valid_sources, start = inputs
    settings: list[Any] = [config.chunk, config.tokenizer, config.model, config.train]
    start_model: list[Ref] = []
    if start is not None:
        model, tokenizer = open_start(start, executor.call)
        yield tokenizer.stage, tokenizer
        stated = stated_fields(config.model, load_preset("demo").model, ModelConfig())
        read = [*executor.read(read_start, model, tokenizer, stated, separator)]
        specials, pattern, settings[2] = read if len(read) > 1 else read * 3  # not imported yet
        start_model = [model]
    # Only if there are other special tokens than the separator, an argument and part of the keys.
    ordinary: list[Any] = []
    if config.data.special_tokens_in_document == "text" and (start is not None or set(specials) != {separator}):
        ordinary = [specials]
    fraction = 0.0 if valid_sources else valid_fraction(config.data, sum(source.bytes for source in train_sources))
    read_as: list[Any] = [fraction, config.data, *ordinary]
    train_ingested = executor.map(ingest_group, "ingest-train", group_sources(train_sources), *read_as)
    valid_ingested = executor.map(ingest_group, "ingest-valid", group_sources(valid_sources), *read_as)
    texts = executor.call(ingest, train_ingested, valid_ingested, fraction, config.data)
    yield "ingest", texts
    if config.budget:
        choice = executor.call(budget, texts, parse_budget(config.budget), machine_kind(config.execution))
        yield "budget", choice
        settings = [*executor.read(read_choice, choice, config.tokenizer)]
    # A choice that is not made yet stands for all settings.
    chunk_config, tokenizer_config, model_config, train_config = settings if len(settings) > 1 else settings * 4
    train_texts, valid_texts = (
        executor.read(read_text_groups, texts, [*train_ingested, *valid_ingested], split)
        for split in ("train", "valid")
    )
    train_cuts = executor.map(chunk_group, "chunk-train", train_texts, specials, pattern, chunk_config)
    valid_cuts = executor.map(chunk_group, "chunk-valid", valid_texts, specials, pattern, chunk_config)
    chunks = executor.call(chunk, train_cuts, valid_cuts)
    yield "chunk", chunks
    # The version of jieba is an argument, and so part of the keys, only if it is used.
    versions = [pattern if isinstance(pattern, Ref) else tables_identity(pattern)]
    versions += [jieba_version()] if pattern == JIEBA else []
    train_groups = executor.read(read_groups, chunks, train_texts, train_cuts, "train")
    if start is None:
        parts = executor.map(count_group, "count", train_groups, specials, pattern, *versions)
        while len(parts) > _COUNTS_PER_SUM:
            batches = [parts[first : first + _COUNTS_PER_SUM] for first in range(0, len(parts), _COUNTS_PER_SUM)]
            parts = executor.map(count_sum, "count-sum", batches)
        counts = executor.call(count, parts)
        yield "count", counts
        tokenizer = executor.call(merge, counts, tokenizer_config)
        yield "merge", tokenizer
    valid_groups = executor.read(read_groups, chunks, valid_texts, valid_cuts, "valid")
    train_shards = executor.map(encode_group, "encode-train", train_groups, tokenizer, separator, *versions)
    valid_shards = executor.map(encode_group, "encode-valid", valid_groups, tokenizer, separator, *versions)
    index = executor.call(encode, train_shards, valid_shards, tokenizer, separator)
    yield "encode", index
    trained = executor.call(
        train, index, train_shards, valid_shards, tokenizer, model_config, train_config, *start_model
    )
    yield "train", trained
    yield "sample", executor.call(sample, trained, tokenizer, config.sample)


PIPELINE = Chain(_find_inputs, _stages, get_args(StageName), _check_stage)
