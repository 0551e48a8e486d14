"""The page of the filter: which rule removed how much, with examples."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tasks.pages.charts import histogram
from tasks.pages.markdown import code, format_size, plain, table

if TYPE_CHECKING:
    from lm.curate.config import FilterConfig
    from tasks.runtime.output import Output
    from tasks.runtime.run_context import Attempt

_MAX_ROWS = 20
_MAX_HISTOGRAMS = 6
_NAMES = {"train": "training", "valid": "validation"}


def filter_page(
    out: "Attempt",
    ingested: "Output",
    train: "list[Output]",
    valid: "list[Output]",
    config: "FilterConfig",
    classifier: "Output | None" = None,
) -> Iterator[str]:
    """Show documents and bytes by rule and by source, removed documents of each rule, and histograms."""
    from lm.curate.document_filter import MIN_SCORE, DocumentFilter  # slow to import
    from lm.curate.filtered_text import Sample, edges_of
    from lm.curate.rules import RULES, figure_of
    from lm.curate.samples import choose_samples

    outputs = [*train, *valid]
    parts = [output.manifest["figures"] for output in outputs]
    rows = []
    for split, groups in (("train", train), ("valid", valid)):
        if groups:
            figures = [group.manifest["figures"] for group in groups]
            rows.append(
                (
                    _NAMES[split],
                    *show_shares(
                        _total([part["kept"] for part in figures]), _total([part["read"] for part in figures])
                    ),
                )
            )
    yield table(("text", "documents kept", "of", "share", "kept", "of", "share"), rows)
    if not valid:
        yield "The validation text is not filtered: `data.valid` names it."
    document_filter = DocumentFilter(config)
    limits = document_filter.limits | ({MIN_SCORE: classifier.json("least_score.json")} if classifier else {})
    removed = {
        rule: total
        for rule in document_filter.reasons
        if (total := _total([part["removed"][rule] for part in parts if rule in part["removed"]]))["documents"]
    }
    yield "## What each rule removed"
    yield "The first rule that a document fails removes it. The rules are asked in this order."
    yield from _funnel(limits, removed, _total([part["read"] for part in parts]))
    yield "## Sources"
    yield from show_parts(parts, "sources", "source")
    if config.languages:
        yield "## Languages of the documents that pass the rules"
        yield from show_parts(parts, "languages", "language")
    if config.masks:
        masked = {kind: sum(part["masked"].get(kind, 0) for part in parts) for kind in config.masks}
        yield f"Masked: {', '.join(f'{kind} {count:,}' for kind, count in masked.items())}."
    samples = out.run.store.map(lambda output: output.json("removed_samples.json"), outputs)
    yield "## Examples of what was removed"
    yield "The documents of each rule with the smallest hashes, at most 300 characters of each."
    for rule in removed:
        shown = choose_samples(Sample(**sample) for part in samples for sample in part.get(rule, []))
        yield f"**{rule}**"
        yield "\n".join(f"- {plain(sample.value)}: {code(sample.text)} ({code(sample.source)})" for sample in shown)
    most = sorted(
        (rule for rule in removed if rule in (*RULES, MIN_SCORE)), key=lambda rule: -removed[rule]["documents"]
    )
    for rule in most[:_MAX_HISTOGRAMS]:
        name = "score" if rule == MIN_SCORE else figure_of(rule)
        counts = np.sum([part["histograms"][name] for part in parts if name in part["histograms"]], axis=0)
        label = f"{name.replace('_', ' ')}; the line is the limit"
        yield histogram(f"{rule}, all documents", label, counts, edges_of(name), "documents", float(limits[rule]))


def _total(parts: list[Mapping[str, int]]) -> dict[str, int]:
    return {unit: sum(part[unit] for part in parts) for unit in ("documents", "bytes")}


def show_shares(part: Mapping[str, int], whole: Mapping[str, int]) -> tuple[Any, ...]:
    """Return documents, of how many, the share; and the same of bytes."""
    return (
        part["documents"],
        whole["documents"],
        _share(part["documents"], whole["documents"]),
        format_size(part["bytes"]),
        format_size(whole["bytes"]),
        _share(part["bytes"], whole["bytes"]),
    )


def _share(part: int, whole: int) -> str:
    return f"{100 * part / max(1, whole):.2f} %"


def _funnel(
    limits: Mapping[str, float | str], removed: Mapping[str, Mapping[str, int]], read: Mapping[str, int]
) -> Iterator[str]:
    left = dict(read)
    rows: list[tuple[Any, ...]] = [("(all documents)", "", "", "", "", left["documents"], format_size(left["bytes"]))]
    for rule, gone in removed.items():
        left = {unit: left[unit] - gone[unit] for unit in left}
        share, byte_share = _share(gone["documents"], read["documents"]), _share(gone["bytes"], read["bytes"])
        now = left["documents"], format_size(left["bytes"])
        rows.append((rule, plain(limits[rule]), gone["documents"], share, byte_share, *now))
    header = ("rule", "limit", "documents removed", "of all documents", "of all bytes", "documents left", "bytes left")
    yield table(header, rows)
    if unused := [rule for rule in limits if rule not in removed]:
        yield f"These rules removed nothing: {', '.join(unused)}."


def show_parts(parts: list[dict[str, Any]], figure: str, label: str) -> Iterator[str]:
    """Show documents and bytes by source or by language, those with the most bytes first."""
    totals: dict[str, list[list[Mapping[str, int]]]] = {}
    for part in parts:
        for name, (read, kept) in part[figure].items():
            groups = totals.setdefault(name, [[], []])
            groups[0].append(read)
            groups[1].append(kept)
    sums = {name: (_total(kept), _total(read)) for name, (read, kept) in totals.items()}
    rows = [
        (code(name), *show_shares(*pair)) for name, pair in sorted(sums.items(), key=lambda item: -item[1][1]["bytes"])
    ]
    yield table((label, "documents kept", "of", "share", "kept", "of", "share"), rows[:_MAX_ROWS])
    if len(rows) > _MAX_ROWS:
        yield f"… and {len(rows) - _MAX_ROWS:,} more."
