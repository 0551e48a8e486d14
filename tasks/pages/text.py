"""Pages of the stages that read, cut and encode text: documents, chunks and tokens."""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from tasks.pages.charts import QUARTER_OCTAVES, histogram
from tasks.pages.markdown import code, table

if TYPE_CHECKING:
    from tasks.runtime.output import Output
    from tasks.runtime.run_context import Attempt

_MAX_SOURCES = 20


def ingest(out: "Attempt", train: "list[Output]", valid: "list[Output]", **inputs: Any) -> Iterator[str]:
    """Show documents, bytes and sources, and the lengths of the documents."""
    statistics = out.read_json("text_groups.json")["statistics"]
    columns = ("documents", "bytes", "replaced", "separators_removed")
    rows = [(split, *(counts[name] for name in columns)) for split, counts in statistics.items()]
    yield table(("text", "documents", "bytes", "invalid sequences replaced", "separators removed"), rows)
    lengths = np.sum([counts["lengths"] for counts in statistics.values()], axis=0)
    yield histogram("Length of the documents", "characters", lengths, QUARTER_OCTAVES, "documents")
    yield from _skipped_pages([group.manifest["figures"].get("pages") for group in (*train, *valid)])
    sources = [source for group in (*train, *valid) for source in group.manifest["sources"]]
    shown = [(code(source["url"]), source["bytes"], code(source["sha256"][:12])) for source in sources[:_MAX_SOURCES]]
    yield table(("source", "bytes as stored", "sha256"), shown)
    if len(sources) > _MAX_SOURCES:
        yield f"… and {len(sources) - _MAX_SOURCES:,} more sources."


def ingest_mix(out: "Attempt", names: list[str], **inputs: Any) -> Iterator[str]:
    """Show documents and bytes of each source of a mixture, and the lengths of all documents."""
    content = out.read_json("text_groups.json")
    columns = ("documents", "bytes", "replaced", "separators_removed")
    texts = {name: content["sources"][name] for name in names} | {"all": content["statistics"]}
    rows = [
        (name, split, *(counts[column] for column in columns))
        for name, splits in texts.items()
        for split, counts in splits.items()
    ]
    header = ("source", "text", "documents", "bytes", "invalid sequences replaced", "separators removed")
    yield table(header, rows)
    lengths = np.sum([counts["lengths"] for counts in content["statistics"].values()], axis=0)
    yield histogram("Length of the documents", "characters", lengths, QUARTER_OCTAVES, "documents")


def _skipped_pages(groups: list[dict[str, Any] | None]) -> Iterator[str]:
    """Show how many web pages were skipped, by reason, and the first damaged ones."""
    described = [group for group in groups if group]
    skipped = sum((Counter(group["skipped"]) for group in described), Counter())
    if damaged := sum(group["damaged"] for group in described):
        skipped["damaged"] = damaged
    if skipped:
        yield table(("web pages skipped", "number"), skipped.most_common())
    if names := [name for group in described for name in group["names"]][:_MAX_SOURCES]:
        yield "Damaged pages and records:\n\n" + "\n".join(f"- {code(name)}" for name in names)


def chunk(out: "Attempt", train: "list[Output]", valid: "list[Output]") -> Iterator[str]:
    """Show the number and the sizes of the chunks."""
    rows = []
    for split, parts in (("train", train), ("valid", valid)):
        figures = [part.manifest["figures"] for part in parts if part.manifest["figures"]["chunks"]]
        chunks, size = (sum(part[name] for part in figures) for name in ("chunks", "bytes"))
        smallest = min((part["smallest"] for part in figures), default=0)
        largest = max((part["largest"] for part in figures), default=0)
        rows.append((split, chunks, size, smallest, largest))
    yield table(("text", "chunks", "bytes", "smallest", "largest"), rows)
    sizes = np.sum([part.manifest["figures"]["sizes"] for part in (*train, *valid)], axis=0)
    yield histogram("Size of the chunks", "bytes", sizes, QUARTER_OCTAVES, "chunks")


def encode(out: "Attempt", train: "list[Output]", valid: "list[Output]", **inputs: Any) -> Iterator[str]:
    """Show tokens, compression and throughput, and the lengths of the documents."""
    columns = ("documents", "bytes", "tokens", "bytes_per_token")
    rows = [
        (split, len(parts), *(out.figures[split][name] for name in columns))
        for split, parts in (("train", train), ("valid", valid))
    ]
    yield table(("text", "shards", "documents", "bytes", "tokens", "bytes per token"), rows)
    if sources := out.figures["train"].get("sources"):
        tokens = max(1, out.figures["train"]["tokens"])
        rows = [
            (name, *(counts[column] for column in columns[:3]), f"{100 * counts['tokens'] / tokens:.1f} %")
            for name, counts in sources.items()
        ]
        yield table(("source", "documents", "bytes", "tokens", "share of the tokens"), rows)
    if special_texts := sum(part.manifest["figures"].get("special_texts", 0) for part in (*train, *valid)):
        yield (
            f"**{special_texts:,}** texts of special tokens inside documents were encoded as ordinary text "
            "(`data.special_tokens_in_document` is text)."
        )
    yield _throughput([part.manifest for part in (*train, *valid)])
    shards = [*train, *valid]
    shown = shards[:: -(-len(shards) // 500)]
    lengths = np.zeros(len(QUARTER_OCTAVES) - 1, int)
    for path in out.run.store.map(lambda part: part.path("documents.npy"), shown):
        lengths += np.histogram(np.diff(np.load(path), prepend=0), QUARTER_OCTAVES)[0]
    title = "Length of the documents" + (f" of {len(shown)} shards" if len(shown) < len(shards) else "")
    yield histogram(title, "tokens", lengths, QUARTER_OCTAVES, "documents")


def _throughput(manifests: list[dict[str, Any]]) -> str:
    """Return the throughput of the run that made the newest shard."""
    run = max((manifest["made"] for manifest in manifests), key=lambda made: made["started"])["run"]
    encoded = [manifest for manifest in manifests if manifest["made"]["run"] == run]
    megabytes = sum(manifest["figures"]["bytes"] for manifest in encoded) / 1e6
    made = [manifest["made"] for manifest in encoded]
    seconds = max(part["started"] + part["seconds"] for part in made) - min(part["started"] for part in made)
    cpu_seconds = sum(part["cpu_seconds"] for part in made)
    return (
        f"Run `{run}` encoded {megabytes:,.1f} MB ({len(encoded)} of {len(manifests)} shards) at "
        f"**{megabytes / max(1e-9, seconds):.2f} MB/s**, or {megabytes / max(1e-9, cpu_seconds):.2f} MB per CPU-second."
    )
