"""Sources that change between their check and a later reading: no output is made from them."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lm.common.errors import UserError
from lm.text import ingest as text_ingest
from lm.text import sources
from lm.text.config import ChunkConfig, DataConfig
from lm.text.pretokenize import END_OF_TEXT, GPT2_PATTERN
from tasks.chunk import chunk_group
from tasks.import_model import find_model_files, import_model
from tasks.ingest import find_sources, ingest, ingest_group
from tasks.runtime.inputs import read_text_groups
from tasks.runtime.output import Ref
from tasks.runtime.run_context import RunContext
from tasks.runtime.source_records import describe_sources, keep_unchanged
from tests.helpers.corpora import write_text
from tests.helpers.roots import materialize, run_context

CHANGED = r"a\.txt changed while the pipeline ran; run it again"


def read_group(run: RunContext, path: Path, fraction: float) -> Ref:
    data = DataConfig(train=[str(path)])
    return materialize(ingest_group, run, find_sources(data, run.store)[0], fraction, data)


def split(run: RunContext, group: Ref, fraction: float) -> Ref:
    return materialize(ingest, run, [group], [], fraction, DataConfig())


def cut(run: RunContext, group: Ref) -> Ref:
    (text,) = read_text_groups(run.store, split(run, group, 0.0), [group], "train")
    return materialize(chunk_group, run, text, [END_OF_TEXT], GPT2_PATTERN, ChunkConfig())


@pytest.mark.parametrize(
    ("fraction", "text", "reader"),
    [(0.0, "apple", cut), (0.3, "apple " * 20, lambda run, group: split(run, group, 0.3))],
    ids=["chunk", "split of one document"],
)
@pytest.mark.parametrize("has_version", [True, False])
def test_a_source_that_changes_after_its_group_was_read_ends_the_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_version: bool,
    fraction: float,
    text: str,
    reader: Callable[[RunContext, Ref], Ref],
) -> None:
    if not has_version:
        for module in (sources, text_ingest):
            monkeypatch.setattr(module, "file_version", lambda url: None)
        monkeypatch.setattr("tasks.runtime.source_records.file_version", lambda url: None)
    run, path = run_context(tmp_path / "root"), write_text(tmp_path / "a.txt", text)
    group = read_group(run, path, fraction)
    write_text(path, text.replace("apple", "mangos"))
    with pytest.raises(UserError, match=CHANGED):
        reader(run, group)
    write_text(path, text)
    assert read_group(run, path, fraction) == group
    reader(run, group)


def test_a_document_that_changes_before_it_is_held_out_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, open_ranges = write_text(tmp_path / "a.txt", f"apple{END_OF_TEXT}" * 40), sources.open_ranges

    def change(url: str, ranges: sources.ByteRanges) -> object:
        write_text(path, f"mango{END_OF_TEXT}" * 41)
        return open_ranges(url, ranges)

    monkeypatch.setattr(text_ingest, "open_ranges", change)
    with pytest.raises(UserError, match=CHANGED):
        read_group(run_context(tmp_path / "root"), path, 0.999)


def test_only_a_source_with_another_version_is_read_to_compare_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, path = run_context(tmp_path / "root").store, write_text(tmp_path / "a.txt", "apple")
    described, hashed = describe_sources([str(path)], store), list[str]()
    hash_source = sources.hash_source

    def record(url: str) -> object:
        hashed.append(url)
        return hash_source(url)

    monkeypatch.setattr("tasks.runtime.source_records.hash_source", record)
    with keep_unchanged(described, store):
        pass
    assert hashed == []
    os.utime(path, ns=(1, 1))
    with keep_unchanged(described, store):
        pass
    assert hashed == [str(path)]
    with pytest.raises(UserError, match=CHANGED), keep_unchanged(described, store):
        path.write_text("mango and apple")
    path.write_text("apple")
    with pytest.raises(UserError, match=CHANGED), keep_unchanged(described, store):
        path.unlink()
        write_text(tmp_path / "b.txt", "apple").rename(path)


def test_a_model_file_that_changes_before_the_import_ends_the_run(tmp_path: Path) -> None:
    run, path = run_context(tmp_path / "root"), write_text(tmp_path / "config.json", "{}")
    files = find_model_files(tmp_path, run.store)
    write_text(path, "{ }")
    with pytest.raises(UserError, match=r"config\.json changed while the pipeline ran"):
        materialize(import_model, run, files)
