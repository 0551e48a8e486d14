"""The stage ``ingest``: its key, and warnings about its sources."""

from pathlib import Path

import pytest

from lm.text.config import DataConfig
from lm.text.sources import Source
from tasks.ingest import find_sources, ingest_group
from tests.helpers.corpora import write_text
from tests.helpers.roots import run_context


def test_sources_with_the_same_bytes_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    a, b, c, copy = (str(write_text(tmp_path / f"{name}.txt", name[0])) for name in ("a", "b", "c", "b-copy"))
    store = run_context(tmp_path / "root").store
    find_sources(DataConfig(train=[a, b], valid=[c]), store)
    assert caplog.messages == []
    find_sources(DataConfig(train=[a, b, a], valid=[copy, c]), store)
    assert caplog.messages == [
        f"The training text holds the same source more than once: {a}.",
        f"Validation text is also training text, so its loss will be too low: {copy}.",
    ]
    caplog.clear()
    many = [str(write_text(tmp_path / f"{number}.txt", "same")) for number in range(8)]
    find_sources(DataConfig(train=many), store)
    names = ", ".join(many[:6])
    assert caplog.messages == [f"The training text holds the same source more than once: {names} and 2 more."]


def test_only_the_fraction_that_is_held_out_enters_the_key(tmp_path: Path) -> None:
    run, group = run_context(tmp_path), [Source("/a.txt", 3, "ab" * 32)]
    configs = [DataConfig(), DataConfig(valid_fraction=0.5), DataConfig(valid_max_bytes=3, train=["b"], valid=["c"])]
    calls = [(0.1, config) for config in configs] + [(0.2, DataConfig()), (0.1, DataConfig(text_field="body"))]
    refs = ingest_group.look_up(run, [ingest_group.bind(group, *call) for call in calls])
    assert refs[0] == refs[1] == refs[2]
    assert len(set(refs)) == 3
