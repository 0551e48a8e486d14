"""Stage ``deduplicate``: remove copies of documents from the training text.

Each group of texts is signed alone, so that a new source signs only itself. ``deduplicate`` compares all of them and
lists what each group loses. Only groups that lose something are written again.
"""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lm.curate.config import DeduplicateConfig
from tasks.pages import copies as pages
from tasks.runtime.inputs import OpenTextGroup
from tasks.runtime.losses import write_losses
from tasks.runtime.output import Output
from tasks.runtime.run_context import Attempt
from tasks.runtime.source_records import keep_unchanged
from tasks.runtime.stage import stage
from tasks.runtime.text_parts import text_parts

if TYPE_CHECKING:
    from lm.curate.minhash import MinHash


@stage("deduplicate-sign", is_mapped=True)
def sign_group(
    out: Attempt, group: OpenTextGroup, separator: str, has_digests: bool, minhash: "MinHash | None"
) -> None:
    """Write the places of the documents of a group, and sorted files of their digests and of the keys of their bands.

    The limit of the similarity is no parameter: another one needs no other signatures.
    """
    from lm.curate.copies import sign_texts  # slow to import

    with keep_unchanged(group.sources, out.run.store):
        totals = sign_texts(text_parts(group), separator, has_digests, minhash, group.output.digest, out.directory)
    out.figures = dict(zip(("documents", "bytes"), totals, strict=True))


@stage("deduplicate", page=pages.deduplicate_page)
def deduplicate(
    out: Attempt,
    before: Output,
    train: list[OpenTextGroup],
    signatures: list[Output],
    separator: str,
    config: DeduplicateConfig,
) -> None:
    """Write for each group the numbers of the documents to remove; besides, as records,
    ``removed.parquet``, ``links.parquet``, and the examples and figures of the page.

    ``before``: the output that has the statistics of the texts.
    """
    from lm.curate.copies import PLACES, SignedGroup, find_copies  # slow to import
    from lm.curate.copy_records import LINKS, REMOVED, sample_copies, write_copy_records

    groups = [
        SignedGroup(
            group.urls,
            np.load(output.path(PLACES), mmap_mode="r"),  # read once, into the arrays of all documents
            *(_files(output, kind) for kind in ("documents", "bands")),
        )
        for group, output in zip(train, signatures, strict=True)
    ]
    copies = find_copies(groups, config)
    write_losses(out, [copies.removed(number) for number in range(len(groups))])
    figures = write_copy_records(copies, [part.source for group in train for part in text_parts(group)], out.directory)
    out.write_json("copy_samples.json", [sample._asdict() for sample in sample_copies(copies, config.ngrams)])
    out.write_json("copy_figures.json", asdict(figures))
    out.records = [REMOVED, LINKS, "copy_samples.json", "copy_figures.json"]
    statistics = before.json("text_groups.json")["statistics"]
    gone = [figures.equal, figures.near_duplicates]
    documents, size = (sum(getattr(totals, unit) for totals in gone) for unit in ("documents", "bytes"))
    statistics["train"]["documents"] -= documents
    statistics["train"]["bytes"] -= size + documents * len(separator.encode())
    out.write_json("text_groups.json", {"train": [], "valid": [], "statistics": statistics})
    out.figures = {name: asdict(getattr(figures, name)) for name in ("read", "equal", "near_duplicates")}


def _files(output: Output, kind: str) -> list[Path]:
    names = (file["path"] for file in output.manifest["files"])
    return [output.path(name) for name in sorted(names) if name.endswith(f".{kind}")]


@stage("deduplicate-keep", is_mapped=True)
def keep_group(out: Attempt, group: tuple[OpenTextGroup, Any], separator: str) -> None:
    """Write the documents of a group that stay, and ``texts.json``, as ``ingest-group`` does."""
    from lm.curate.copies import write_without  # slow to import

    opened, removed = group
    with keep_unchanged(opened.sources, out.run.store):
        texts = write_without(parts := text_parts(opened), separator, removed, out.directory)
    out.write_json("texts.json", texts.to_json())
    names = [*dict.fromkeys(part.source for part in parts)]
    out.figures = {"removed": len(removed), "documents": texts.kept_statistics.documents, "sources": names}
