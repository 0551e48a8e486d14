"""Stage ``decontaminate``: remove from the training text what it shares with the validation text, or with files."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from lm.curate.config import DecontaminateConfig
from lm.text.config import DataConfig
from lm.text.documents import TextStatistics, stream_documents
from lm.text.rows import DamagedRows
from lm.text.sources import Source
from tasks.pages import decontamination as pages
from tasks.runtime.inputs import OpenTextGroup
from tasks.runtime.output import Output
from tasks.runtime.run_context import Attempt
from tasks.runtime.source_records import keep_unchanged
from tasks.runtime.stage import stage
from tasks.runtime.text_parts import text_parts

log = logging.getLogger(__name__)


@stage("decontaminate-group", is_mapped=True)
def decontaminate_group(
    out: Attempt,
    group: OpenTextGroup,
    valid: list[OpenTextGroup],
    files: list[Source],
    data: DataConfig,
    config: DecontaminateConfig,
    words: str,
    page_reader: Sequence[str] = (),
    tasks: Mapping[str, list[Source]] | None = None,
) -> None:
    """Write the text of a group without what it shares, and ``texts.json``, as ``ingest-group`` does; besides, as
    records, ``shared.parquet`` with a row for each shared place, and ``shared_samples.json``.

    ``words``: identity of the tables that normalize words. ``page_reader``: what decides the text of web pages among
    the files. ``tasks``: files of problems by the name of their task.
    """
    from lm.curate.decontaminate import ProtectedTexts, task_texts  # slow to import
    from lm.curate.decontaminated_text import SHARED, decontaminate_texts
    from lm.curate.text_parts import read_batches
    from lm.eval.problems import load_task

    def validation_documents() -> Iterator[str]:
        for part in valid:
            for batch in read_batches(text_parts(part), data.separator):
                yield from (document.data.decode("utf-8", "replace") for document in batch.documents)

    def documents_of(source: Source) -> Iterator[str]:
        for piece in stream_documents(source.url, data, TextStatistics()):
            yield piece.removesuffix(data.separator)

    def problems_of(task: str, source: Source) -> Iterator[str]:
        damaged = DamagedRows()
        yield from task_texts(load_task(task, [source.url], damaged=damaged))
        if damaged.count:
            log.warning("%s", damaged)

    problems = [(task, source) for task, sources in (tasks or {}).items() for source in sources]
    protecting = [*files, *(source for _, source in problems), *(source for part in valid for source in part.sources)]
    with keep_unchanged([*group.sources, *protecting], out.run.store):
        named = [("validation text", validation_documents())] if valid else []
        named += [(source.url, documents_of(source)) for source in files]
        named += [(f"{task}: {source.url}", problems_of(task, source)) for task, source in problems]
        protected = ProtectedTexts(named, config.ngrams)
        result = decontaminate_texts(
            parts := text_parts(group), data.separator, protected, config.action == "cut", out.directory
        )
    out.write_json("texts.json", result.texts.to_json())
    out.write_json("shared_samples.json", [sample._asdict() for sample in result.samples])
    out.records = [SHARED, "shared_samples.json"]
    kept = result.texts.kept_statistics.documents
    out.figures = {**asdict(result.figures), "kept": kept, "sources": [*dict.fromkeys(part.source for part in parts)]}


@stage("decontaminate", page=pages.decontaminate_page)
def decontaminate(out: Attempt, before: Output, train: list[Output]) -> None:
    """Write ``text_groups.json`` with the statistics of the text. ``before``: the output that has those of the text as
    it was."""
    statistics = before.json("text_groups.json")["statistics"]
    figures = [output.manifest["figures"] for output in train]
    texts = out.run.store.map(lambda output: output.json("texts.json"), train)
    statistics["train"]["documents"] = sum(part["kept"] for part in figures)
    statistics["train"]["bytes"] = sum(text["bytes"] for part in texts for text in part["kept"])
    out.write_json("text_groups.json", {"train": [], "valid": [], "statistics": statistics})
    out.figures = {
        name: {unit: sum(part[name][unit] for part in figures) for unit in ("documents", "bytes")}
        for name in ("read", "shared")
    }
