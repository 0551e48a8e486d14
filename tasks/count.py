"""Stage ``count``: count the pretokens of each group of chunks, then add up the counts."""

from collections.abc import Iterator

from tasks.pages import counts as pages
from tasks.runtime.inputs import Ranges, open_ranges, size_in_bytes
from tasks.runtime.output import Output
from tasks.runtime.run_context import Attempt
from tasks.runtime.stage import stage


@stage("count-group", is_mapped=True)
def count_group(
    out: Attempt, group: Ranges, special_tokens: list[str], pattern: str, tables: str, jieba: str = ""
) -> None:
    """Count the pretokens of one group.

    ``tables``: see :func:`lm.text.character_tables.tables_identity`. ``jieba``: its version, if the pattern is jieba,
    for the key.
    """
    from lm.text.character_tables import check_tables
    from lm.tokenizer.pretoken_counts import count_to_file

    check_tables(pattern, tables)
    memory_bytes = (out.run.execution.count_memory << 20) // out.run.execution.workers

    def texts(separator: str) -> Iterator[Iterator[bytes]]:
        """Yield the blocks of the ranges with this ``separator``."""
        ranges = [item for item in group if item[1].separator == separator]
        return (blocks for blocks, _, _ in open_ranges(ranges, out.run.stopping))

    rows = {separator: texts(separator) for separator in {part.separator for _, part in group} - {""}}
    path = out.directory / "counts.parquet"
    total, unique = count_to_file(path, texts(""), special_tokens, pattern, memory_bytes, rows)
    out.figures = {"bytes": size_in_bytes(group), "pretokens": total, "unique": unique}


@stage("count-sum", is_mapped=True)
def count_sum(out: Attempt, parts: list[Output]) -> None:
    """Add up the counts of some groups: a part of the work of ``count``, which workers share."""
    _add_up(out, parts)


@stage("count", page=pages.count)
def count(out: Attempt, parts: list[Output]) -> None:
    """Add up the counts of all groups."""
    _add_up(out, parts)


def _add_up(out: Attempt, parts: list[Output]) -> None:
    from lm.tokenizer.pretoken_counts import merge_counts

    paths = out.run.store.map(lambda part: part.path("counts.parquet"), parts)
    total, unique = merge_counts(paths, out.directory / "counts.parquet")
    out.figures = {"pretokens": total, "unique": unique}
