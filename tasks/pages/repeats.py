"""The page of repeated lines or paragraphs: how much text they were, with examples."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tasks.pages.markdown import code, format_size, table

if TYPE_CHECKING:
    from lm.curate.config import Unit
    from tasks.runtime.output import Output
    from tasks.runtime.run_context import Attempt


def repeats_page(
    out: "Attempt", before: "Output", changed: "list[Output]", separator: str, unit: "Unit"
) -> Iterator[str]:
    """Show how many lines or paragraphs were removed, by group of sources, and examples."""
    from lm.curate.repeated_text import RepeatedSample  # slow to import
    from lm.curate.samples import choose_samples

    yield f"Each {unit} that occurs more than once in the training text is removed, also where it occurs first."
    rows = []
    for output in changed:
        part = output.manifest["figures"]
        source = ", ".join(map(code, part["sources"][:3]))
        rows.append(
            (
                source,
                part["repeated"],
                part["changed"]["documents"],
                format_size(part["changed"]["bytes"]),
                part["removed"],
            )
        )
    columns = ("source", f"{unit}s removed", "documents changed", "bytes removed", "documents with nothing left")
    yield table(columns, rows)
    samples = [
        RepeatedSample(**sample)
        for part in out.run.store.map(lambda output: output.json("repeated_samples.json"), changed)
        for sample in part
    ]
    if samples:
        yield "## Examples of what was removed"
        yield f"The {unit}s with the smallest hashes, at most 300 characters of each."
        yield "\n".join(f"- {code(sample.text)}" for sample in choose_samples(samples))
