"""The page of removed copies: how many, in clusters of which size, with examples."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tasks.pages.curation import show_parts, show_shares
from tasks.pages.markdown import code, plain, table

if TYPE_CHECKING:
    from tasks.runtime.run_context import Attempt

_MAX_SIZES = 20


def deduplicate_page(out: "Attempt", **inputs: Any) -> Iterator[str]:
    """Show removed documents and bytes by reason and by source, clusters by size, and examples beside what stays."""
    figures = out.read_json("copy_figures.json")
    names = {"equal": "equal to an earlier document", "near_duplicates": "near-duplicates"}
    rows = [(name, *show_shares(figures[kind], figures["read"])) for kind, name in names.items()]
    yield table(("removed", "documents", "of", "share", "bytes", "of", "share"), rows)
    yield "The first document of a cluster of copies stays. `links.parquet` has the pairs that prove near-duplicates."
    yield "## Sources"
    yield from show_parts([figures], "sources", "source")
    if clusters := figures["clusters"]:
        yield "## Clusters of copies"
        largest = sorted(clusters, key=int)[-1]
        shown = [(int(size), count) for size, count in clusters.items()][:_MAX_SIZES]
        yield table(("documents in the cluster", "clusters"), shown)
        yield f"The largest cluster has {int(largest):,} documents."
    samples = out.read_json("copy_samples.json")
    if samples:
        yield "## Examples of what was removed"
        yield "At most 300 characters of a removed document, its similarity to the one that stays, and that one."
        for sample in samples:
            kind = sample["reason"].replace("_", "-")
            yield f"- {kind}, {plain(sample['similarity'])}: {code(sample['removed'])}\n- stays: {code(sample['kept'])}"
