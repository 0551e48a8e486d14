"""The stages of the pipeline in their order. This is the only description of the order."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from flows.config import PipelineConfig, StageName
from lm.text.sources import Source
from tasks.chunk import chunk
from tasks.count import count, count_group, count_sum
from tasks.encode import encode, encode_group
from tasks.ingest import ingest
from tasks.merge import merge
from tasks.runtime.output import Ref
from tasks.runtime.stage import Stage
from tasks.sample import sample
from tasks.train import train

_COUNTS_PER_SUM = 32  # files of counts that are open at the same time


class Executor(Protocol):
    """Something that returns the outputs of stages: it runs the stages, or only looks in the cache."""

    def call(self, stage: Stage, *arguments: Any) -> Ref:
        """Return the output of a stage."""

    def groups(self, texts: Ref, chunks: Ref, split: str) -> Sequence[Any]:
        """Return the groups of chunks of a split."""

    def map(self, stage: Stage, title: str, items: Sequence[Any], *arguments: Any) -> list[Ref]:
        """Return the outputs of a stage for all items, each the first argument of a call."""


def run_chain(
    config: PipelineConfig,
    sources: tuple[list[Source], list[Source]],
    executor: Executor,
    until: StageName | None = None,
) -> Iterator[tuple[StageName, Ref]]:
    """Yield the name and the output of each stage when it is done, up to and including ``until`` (None: all stages).

    ``sources`` are the training and the validation sources.
    """
    for name, ref in _all_stages(config, sources, executor):
        yield name, ref
        if name == until:
            return


def _all_stages(
    config: PipelineConfig, sources: tuple[list[Source], list[Source]], executor: Executor
) -> Iterator[tuple[StageName, Ref]]:
    specials, pattern, separator = config.tokenizer.special_tokens, config.tokenizer.pattern, config.data.separator

    texts = executor.call(ingest, *sources, config.data)
    yield "ingest", texts
    chunks = executor.call(chunk, texts, specials, pattern, config.chunk)
    yield "chunk", chunks
    train_groups = executor.groups(texts, chunks, "train")
    parts = executor.map(count_group, "count", train_groups, specials, pattern)
    while len(parts) > _COUNTS_PER_SUM:
        batches = [parts[start : start + _COUNTS_PER_SUM] for start in range(0, len(parts), _COUNTS_PER_SUM)]
        parts = executor.map(count_sum, "count-sum", batches)
    counts = executor.call(count, parts)
    yield "count", counts
    tokenizer = executor.call(merge, counts, config.tokenizer)
    yield "merge", tokenizer
    valid_groups = executor.groups(texts, chunks, "valid")
    train_shards = executor.map(encode_group, "encode-train", train_groups, tokenizer, separator)
    valid_shards = executor.map(encode_group, "encode-valid", valid_groups, tokenizer, separator)
    index = executor.call(encode, train_shards, valid_shards, tokenizer, separator)
    yield "encode", index
    model = executor.call(train, index, train_shards, valid_shards, tokenizer, config.model, config.train)
    yield "train", model
    yield "sample", executor.call(sample, model, tokenizer, config.sample)
