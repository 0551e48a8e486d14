"""Stage ``dialogs``: read, check and divide the data of post-training."""

import logging

from lm.common.errors import UserError
from lm.posttrain.config import DialogsConfig
from lm.text.sources import Source, check_unchanged
from tasks.pages import posttrain as pages
from tasks.runtime.run_context import Attempt
from tasks.runtime.source_records import describe_sources
from tasks.runtime.stage import stage
from tasks.runtime.store import Store

log = logging.getLogger(__name__)


def find_dialog_sources(config: DialogsConfig, store: Store) -> list[list[Source]]:
    """Return the sources of dialogs and problems, with their digests: train, valid, task_train and task_test."""
    fields = (config.train, config.valid, config.task_train, config.task_test)
    return [describe_sources(patterns, store) for patterns in fields]


@stage("dialogs", page=pages.dialogs)
def dialogs(
    out: Attempt,
    train: list[Source],
    valid: list[Source],
    task_train: list[Source],
    task_test: list[Source],
    config: DialogsConfig,
    libraries: dict[str, str] | None = None,
) -> None:
    """Write ``{dialogs,pairs,problems}-{train,valid}.jsonl``, ``problems-test.jsonl`` and ``examples.json``.

    ``libraries``: versions of those that make the problems, for the key.
    """
    from lm.posttrain.data import read_examples, write_rows

    out.sources = [*train, *valid, *task_train, *task_test]
    urls = [[source.url for source in sources] for sources in (train, valid, task_train, task_test)]
    *splits, test, counts = read_examples(config, *urls)
    for source in out.sources:
        check_unchanged(source)
    for count in counts:
        if count.unused_fraction > config.max_unused_fraction:
            raise UserError(
                f"{count}. Correct the files, or set dialogs.max_unused_fraction (now {config.max_unused_fraction:g}) "
                "to 1 to use the other rows."
            )
        if count.unused_fraction >= 0.05:
            log.warning("%s.", count)
    for name, split in zip(("train", "valid"), splits, strict=True):
        for kind in ("dialogs", "pairs", "problems"):
            rows = getattr(split, kind)
            write_rows(out.directory / f"{kind}-{name}.jsonl", rows)
            out.figures.setdefault(kind, {})[name] = len(rows)
    write_rows(out.directory / "problems-test.jsonl", test.problems)
    out.figures["problems"]["test"] = len(test.problems)
    out.figures["damaged"] = sum(count.damaged.count for count in counts)
    out.figures["left_out"] = sum(count.left_out for count in counts)
    names = [name for count in counts for name in count.damaged.names]
    content = {"reward": test.reward, "damaged": names[:100]}
    out.write_json("examples.json", content, ensure_ascii=False, indent=1)
