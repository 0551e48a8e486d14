"""The stage ``ingest``: its key, and warnings about its sources."""

import json
from pathlib import Path

import pytest

from lm.text.config import DataConfig
from lm.text.sources import Source
from tasks.ingest import find_sources, ingest, ingest_group
from tests.helpers.corpora import COMPRESSIONS, EOT, write_jsonl, write_parquet, write_text
from tests.helpers.roots import materialize, run_context


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


@pytest.mark.parametrize("suffix", [".txt.gz", ".txt.zst", ".jsonl", ".parquet"])
def test_the_same_documents_in_two_formats_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, suffix: str
) -> None:
    documents = ["one", "two"]
    text = f"one{EOT}two"  # the last document lacks its separator
    plain, other = str(write_text(tmp_path / "a.txt", text)), str(write_text(tmp_path / "b.txt", f"{text}!"))
    copy = tmp_path / f"copy{suffix}"
    if suffix == ".parquet":
        write_parquet(copy, text=documents)
    elif suffix == ".jsonl":
        write_jsonl(copy, *(json.dumps({"text": document}) for document in documents))
    else:
        copy.write_bytes(COMPRESSIONS[copy.suffix](text.encode()))
    run = run_context(tmp_path / "root")

    def warnings(train: list[str], valid: list[str]) -> list[str]:
        caplog.clear()
        data = DataConfig(train=train, valid=valid, valid_fraction=0)
        groups = [
            [materialize(ingest_group, run, [source], 0.0, data) for source in sources]
            for sources in find_sources(data, run.store)
        ]
        materialize(ingest, run, *groups, 0.0, data)
        return [message for message in caplog.messages if "text holds" in message or "is also" in message]

    assert warnings([plain, other], []) == warnings([plain], [other]) == []
    assert warnings([plain, other, str(copy)], [other]) == [
        f"Validation text is also training text, so its loss will be too low: {other}.",
        f"The training text holds the same documents more than once: {plain}, {copy}.",
    ]
    assert warnings([str(copy), other], [plain]) == [
        f"Validation text is also training text, so its loss will be too low: {plain}."
    ]


def test_only_the_fraction_that_is_held_out_enters_the_key(tmp_path: Path) -> None:
    run, group = run_context(tmp_path), [Source("/a.txt", 3, "ab" * 32)]
    configs = [DataConfig(), DataConfig(valid_fraction=0.5), DataConfig(valid_max_bytes=3, train=["b"], valid=["c"])]
    calls = [(0.1, config) for config in configs] + [(0.2, DataConfig()), (0.1, DataConfig(text_field="body"))]
    refs = ingest_group.look_up(run, [ingest_group.bind(group, *call) for call in calls])
    assert refs[0] == refs[1] == refs[2]
    assert len(set(refs)) == 3
