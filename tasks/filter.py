"""Stage ``filter``: remove documents that fail a rule from each group of texts."""

from dataclasses import asdict
from typing import Any

from lm.common.errors import UserError
from lm.curate.config import FilterConfig
from lm.text.documents import TextStatistics
from tasks.pages import curation as pages
from tasks.runtime.inputs import OpenTextGroup, read_texts
from tasks.runtime.output import Output
from tasks.runtime.run_context import Attempt
from tasks.runtime.source_records import keep_unchanged
from tasks.runtime.stage import stage
from tasks.runtime.text_parts import text_parts


@stage("filter-group", is_mapped=True)
def filter_group(
    out: Attempt,
    group: OpenTextGroup,
    separator: str,
    config: FilterConfig,
    language_library: str = "",
    classifier: Output | None = None,
) -> None:
    """Write the documents of a group that pass, and ``texts.json``, as ``ingest-group`` does; besides, as records,
    ``removed.parquet`` with a row for each removed document, and ``removed_samples.json``.

    ``language_library`` is its version, if it decides languages: another one may remove other documents. ``classifier``
    is the output of that stage, if documents are scored.
    """
    from lm.curate.classifier import TextClassifier  # slow to import
    from lm.curate.filtered_text import REMOVED, filter_texts
    from lm.curate.scorer import Scorer

    scorer = None
    if classifier:
        learned = TextClassifier.load(classifier.path("classifier.safetensors"))
        scorer = Scorer(learned, classifier.json("least_score.json"))
    with keep_unchanged(group.sources, out.run.store):
        result = filter_texts(text_parts(group), separator, config, out.directory, scorer)
    out.write_json("texts.json", result.texts.to_json())
    out.write_json(
        "removed_samples.json",
        {rule: [sample._asdict() for sample in samples] for rule, samples in result.samples.items()},
    )
    out.records = [REMOVED, "removed_samples.json"]
    figures = asdict(result.figures)
    out.figures = figures | {"histograms": {name: counts.tolist() for name, counts in figures["histograms"].items()}}


@stage("filter", page=pages.filter_page)
def filter_documents(
    out: Attempt,
    ingested: Output,
    train: list[Output],
    valid: list[Output],
    config: FilterConfig,
    classifier: Output | None = None,
) -> None:
    """Write ``text_groups.json``: the groups of both texts, as ``ingest`` does. Without groups in ``valid``, the
    validation text is not filtered, and not listed."""
    content: dict[str, Any] = {"train": [], "valid": [], "statistics": {}}
    before = ingested.json("text_groups.json")["statistics"]
    for split, first, outputs in (("train", 0, train), ("valid", len(train), valid)):
        groups = out.run.store.map(read_texts, outputs)
        for number, (output, group) in enumerate(zip(outputs, groups, strict=True), first):
            if size := sum(text.bytes for text in group.kept):
                content[split].append({"group": number, "interval": None, "bytes": size, "digest": output.digest})
        statistics = sum((group.kept_statistics for group in groups), start=TextStatistics())
        size = sum(entry["bytes"] for entry in content[split])
        content["statistics"][split] = {**asdict(statistics), "bytes": size} if outputs else before[split]
        if before[split]["documents"] and not content["statistics"][split]["documents"]:
            raise UserError(_nothing_left(split, outputs))
    out.write_json("text_groups.json", content)
    for split, outputs in (("train", train), ("valid", valid)):
        parts = [output.manifest["figures"] for output in outputs]
        read, kept = (
            {unit: sum(part[name][unit] for part in parts) for unit in ("documents", "bytes")}
            for name in ("read", "kept")
        )
        if outputs:
            out.figures[split] = kept | {"removed": {unit: read[unit] - kept[unit] for unit in read}}


def _nothing_left(split: str, outputs: list[Output]) -> str:
    """Return a message that names the rule that removed the most documents."""
    removed: dict[str, int] = {}
    for output in outputs:
        for rule, totals in output.manifest["figures"]["removed"].items():
            removed[rule] = removed.get(rule, 0) + totals["documents"]
    rule = max(removed, key=lambda name: removed[name])
    text = {"train": "training", "valid": "validation"}[split]
    return (
        f"The filter removes all documents of the {text} text, most of them ({removed[rule]:,}) by the rule {rule}. "
        "Relax that rule in filter, or turn it off; textmill explain shows what each rule makes of a document."
    )
