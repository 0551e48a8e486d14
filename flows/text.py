"""The stages that read the text and remove what it should not have, for all flows that start from text."""

from dataclasses import replace
from typing import Any, NamedTuple

from flows.config import TextConfig
from flows.plan import Executor
from lm.common.errors import UserError
from lm.curate.config import Unit
from lm.eval.problems import is_generated
from lm.text.held_out import valid_fraction
from lm.text.ingest import group_sources
from lm.text.sources import Source
from tasks.classifier import train_classifier
from tasks.decontaminate import decontaminate, decontaminate_group
from tasks.deduplicate import deduplicate, keep_group, sign_group
from tasks.filter import filter_documents, filter_group
from tasks.ingest import (
    find_named_sources,
    find_sources,
    ingest,
    ingest_group,
    ingest_mix,
    page_reader_identity,
)
from tasks.repeats import digest_group, drop_repeats, find_repeats, repeats
from tasks.runtime.inputs import TextGroup, read_rewritten_groups, read_text_groups
from tasks.runtime.losses import read_losing_texts
from tasks.runtime.output import Ref
from tasks.runtime.source_records import describe_sources
from tasks.runtime.store import Store


class TextInputs(NamedTuple):
    """The sources that the stages read."""

    train: list[Source]
    valid: list[Source]
    mix: dict[str, list[Source]]
    """Those of ``train`` by the name of their source in ``data.mix``."""
    protected: list[Source]
    """Those of ``decontaminate.files``."""
    tasks: dict[str, list[Source]]
    """Those of ``decontaminate.tasks``."""
    examples: tuple[list[Source], ...]
    """Those of ``filter.score``: wanted and unwanted ones."""


class IngestedText(NamedTuple):
    """A text for training or validation in an output of the stage ``ingest``."""

    split: str
    texts: Ref
    groups: list[Ref]
    """Outputs of ``ingest-group``."""
    split_of_texts: str
    """The text's split in ``texts``."""
    source: str
    """Its name in ``data.mix``; empty if it has none."""


def find_text(config: TextConfig, store: Store) -> TextInputs:
    """Find the sources of the text, of protected text, and of examples. Raises UserError if one is missing."""
    score, tasks = config.filter.score, config.decontaminate.tasks
    for name in tasks:
        if is_generated(name):
            raise UserError(f"decontaminate.tasks has {name}, whose problems are generated; only files are protected.")
    return TextInputs(
        *find_sources(config.data, store),
        find_named_sources(config.data, store),
        describe_sources(config.decontaminate.files, store),
        {name: describe_sources(paths, store) for name, paths in tasks.items()},
        tuple(describe_sources(paths, store) for paths in (score.wanted, score.unwanted)),
    )


def read_text(
    config: TextConfig, inputs: TextInputs, special_tokens: list[str], executor: Executor
) -> tuple[Ref, list[TextGroup], list[TextGroup]]:
    """Read the sources, and remove documents by the rules that are on. Return the output that has the statistics of the
    text, and the groups of the training and the validation text.

    The text of ``special_tokens`` is ordinary text in documents. Validation text that is held out is filtered like the
    training text; that of ``data.valid`` stays as it is.
    """
    page_reader = page_reader_identity(config.data, [*inputs.train, *inputs.valid])
    read_as = [config.data, *([special_tokens] if special_tokens or page_reader else [])]
    if page_reader:
        read_as.append(page_reader)
    texts, parts = (ingest_sources if inputs.mix else ingest_text)(config, inputs, read_as, executor)
    train, valid = (
        [group for part in parts if part.split == split for group in executor.read(read_text_groups, *part[1:])]
        for split in ("train", "valid")
    )
    if config.filter.is_on:
        texts, train, valid = filter_text(config, inputs, texts, train, valid, executor)
    if config.deduplicate.is_on:
        texts, train = remove_copies(config, texts, train, executor)
    if config.deduplicate.repeats:
        texts, train = remove_repeats(config, config.deduplicate.repeats, texts, train, executor)
    if config.decontaminate.is_on:
        texts, train = remove_protected(config, inputs, texts, train, valid, executor)
    return texts, train, valid


def filter_text(
    config: TextConfig,
    inputs: TextInputs,
    texts: Ref,
    train: list[TextGroup],
    valid: list[TextGroup],
    executor: Executor,
) -> tuple[Ref, list[TextGroup], list[TextGroup]]:
    """Remove documents that fail a rule. A classifier that scores documents is trained first."""
    # Arguments that do not matter are left out, and are in no key.
    scored_by: list[Ref] = []
    if config.filter.score.wanted:
        page_reader = page_reader_identity(config.data, [source for kind in inputs.examples for source in kind])
        train_as = config.data, config.filter.score, *filter(None, [page_reader])
        scored_by = [executor.finish(executor.call(train_classifier, *inputs.examples, *train_as))]
    library = config.filter.language_library or [""] * len(scored_by)
    filter_as = config.data.separator, config.filter, *library, *scored_by
    train_outputs = executor.map(filter_group, "filter-train", train, *filter_as)
    valid_outputs = [] if config.data.valid else executor.map(filter_group, "filter-valid", valid, *filter_as)
    outputs = train_outputs, valid_outputs
    texts = executor.finish(executor.call(filter_documents, texts, *outputs, config.filter, *scored_by))
    train = executor.read(read_rewritten_groups, train, dict(enumerate(train_outputs)))
    return texts, train, executor.read(read_rewritten_groups, valid, dict(enumerate(valid_outputs)))


def ingest_text(
    config: TextConfig, inputs: TextInputs, read_as: list[Any], executor: Executor
) -> tuple[Ref, list[IngestedText]]:
    """Read the sources. Return the output of the stage ``ingest``, and the texts in it."""
    fraction = 0.0 if inputs.valid else valid_fraction(config.data, sum(source.bytes for source in inputs.train))
    train = executor.map(ingest_group, "ingest-train", group_sources(inputs.train), fraction, *read_as)
    valid = executor.map(ingest_group, "ingest-valid", group_sources(inputs.valid), fraction, *read_as)
    texts = executor.finish(executor.call(ingest, train, valid, fraction, config.data))
    return texts, [IngestedText(split, texts, [*train, *valid], split, "") for split in ("train", "valid")]


def ingest_sources(
    config: TextConfig, inputs: TextInputs, read_as: list[Any], executor: Executor
) -> tuple[Ref, list[IngestedText]]:
    """Read each source of ``data.mix`` as a text of its own, with its own validation text. So they share no group of
    sources or chunks, and no shard, and text that one of them gets does not change the groups of another."""
    parts: list[IngestedText] = []
    for name, sources in inputs.mix.items():
        fraction = 0.0 if inputs.valid else valid_fraction(config.data, sum(source.bytes for source in sources))
        groups = executor.map(ingest_group, f"ingest {name}", group_sources(sources), fraction, *read_as)
        texts = executor.call(ingest, groups, [], fraction, config.data, title=f"ingest {name}")
        parts += [IngestedText(split, texts, groups, split, name) for split in ("train", "valid")]
    valid: list[Ref] = []
    if inputs.valid:
        groups = executor.map(ingest_group, "ingest-valid", group_sources(inputs.valid), 0.0, *read_as)
        valid = [executor.call(ingest, groups, [], 0.0, config.data, title="ingest-valid")]
        parts.append(IngestedText("valid", valid[0], groups, "train", ""))
    named = [part.texts for part in parts if part.source and part.split == "train"]
    return executor.finish(executor.call(ingest_mix, named, [*inputs.mix], valid)), parts


def remove_copies(
    config: TextConfig, texts: Ref, train: list[TextGroup], executor: Executor
) -> tuple[Ref, list[TextGroup]]:
    """Remove copies from the training text. A new group is signed alone; groups that lose nothing stay as they are."""
    from lm.curate.copies import make_minhash  # slow to import

    separator, chosen = config.data.separator, config.deduplicate
    groups = [replace(group, bytes_before=0) for group in train]  # the text before a group changes nothing in it
    sign_as = separator, chosen.equal, make_minhash(chosen)
    signatures = executor.map(sign_group, "deduplicate-sign", groups, *sign_as)
    texts = executor.call(deduplicate, texts, groups, signatures, separator, chosen)
    losing = executor.read(read_losing_texts, groups, texts)
    written = executor.map(keep_group, "deduplicate-keep", losing, separator)
    outputs = {item.number: output for item, output in zip(losing, written, strict=True)}
    return executor.finish(texts), executor.read(read_rewritten_groups, train, outputs)


def remove_repeats(
    config: TextConfig, unit: Unit, texts: Ref, train: list[TextGroup], executor: Executor
) -> tuple[Ref, list[TextGroup]]:
    """Remove repeated lines or paragraphs from the training text. A new group is digested alone."""
    separator = config.data.separator
    groups = [replace(group, bytes_before=0) for group in train]  # the text before a group changes nothing in it
    digests = executor.map(digest_group, "repeats-digest", groups, separator, unit)
    found = executor.call(find_repeats, digests, unit)
    losing = executor.read(read_losing_texts, groups, found)
    written = executor.map(drop_repeats, "repeats-drop", losing, separator, unit)
    texts = executor.finish(executor.call(repeats, texts, written, separator, unit))
    outputs = {item.number: output for item, output in zip(losing, written, strict=True)}
    return texts, executor.read(read_rewritten_groups, train, outputs)


def remove_protected(
    config: TextConfig,
    inputs: TextInputs,
    texts: Ref,
    train: list[TextGroup],
    valid: list[TextGroup],
    executor: Executor,
) -> tuple[Ref, list[TextGroup]]:
    """Remove from the training text what it shares with protected text."""
    from lm.curate.normalized_words import words_identity  # slow to import

    page_reader = page_reader_identity(config.data, inputs.protected)
    protect_as: list[Any] = [config.data, config.decontaminate, words_identity()]
    if page_reader or inputs.tasks:  # only then arguments, and parts of the keys
        protect_as += [page_reader, *filter(None, [inputs.tasks])]
    protected = valid if config.decontaminate.validation else []
    outputs = executor.map(decontaminate_group, "decontaminate", train, protected, inputs.protected, *protect_as)
    texts = executor.finish(executor.call(decontaminate, texts, outputs))
    return texts, executor.read(read_rewritten_groups, train, dict(enumerate(outputs)))
