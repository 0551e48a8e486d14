"""The page of decontamination: what the training text shared with protected text."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tasks.pages.curation import show_shares
from tasks.pages.markdown import code, table

if TYPE_CHECKING:
    from tasks.runtime.output import Output
    from tasks.runtime.run_context import Attempt


def decontaminate_page(out: "Attempt", before: "Output", train: "list[Output]") -> Iterator[str]:
    """Show how many documents share words with which protected text, and examples."""
    from lm.curate.decontaminated_text import SharedSample  # slow to import
    from lm.curate.samples import choose_samples

    columns = ("documents that share words", "of", "share", "bytes", "of", "share")
    yield table(columns, [show_shares(out.figures["shared"], out.figures["read"])])
    names: dict[str, int] = {}
    for output in train:
        for name, count in output.manifest["figures"]["protected"].items():
            names[name] = names.get(name, 0) + count
    if not names:
        return
    yield table(("protected text", "shared places"), [(code(name), count) for name, count in names.items()])
    parts = out.run.store.map(lambda output: output.json("shared_samples.json"), train)
    yield "Shared words, at most 300 characters, those with the smallest hashes:"
    samples = choose_samples([SharedSample(**sample) for part in parts for sample in part])
    yield "\n".join(f"- {code(sample.text)} ({code(sample.protected)})" for sample in samples)
