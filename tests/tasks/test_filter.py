"""The stage ``filter`` between ``ingest`` and ``chunk``: what it keeps, what reruns, and its page."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow.parquet as pq
import pytest

from flows.config import PipelineConfig
from flows.pipeline import pipeline_stages
from lm.common.errors import UserError
from lm.curate import RULES, FilterConfig, RulesConfig, compute_figures, first_failed_rule, pack_documents
from lm.curate.filtered_text import filter_texts
from lm.text.config import ChunkConfig, DataConfig
from lm.tokenizer.config import TokenizerConfig
from tasks.runtime.output import Output, json_digest
from tests.helpers.corpora import EOT, write_jsonl, write_text
from tests.helpers.local_executor import LocalExecutor, run_locally
from tests.lm.curate.test_rules import FAILING, GOOD

RULES_ON = FilterConfig(RulesConfig())
HOSTILE = "<script>alert(1)</script> | `*bold*` ![x](http://a.example/b.png)\x1b[31m\u202e\n# Title\n" * 3
MADE = ["filter-train", "filter-valid", "filter", "chunk-train", "chunk-valid", "chunk"]


def good(number: int) -> str:
    return f"{GOOD}\nThis is the story with the number {number}, and it ends here."


TEXTS = [text for number, bad in enumerate([*FAILING.values(), HOSTILE]) for text in (good(number), bad)]


def make_config(folder: Path, filtered: FilterConfig = RULES_ON, **data: Any) -> PipelineConfig:
    """Return a configuration of two sources, one read in place and one copied."""
    write_text(folder / "a.txt", "".join(text + EOT for text in TEXTS[:30]) + "\n")
    write_jsonl(folder / "b.jsonl", *(json.dumps({"text": text}) for text in TEXTS[30:]))
    sources = [str(folder / "a.txt"), str(folder / "b.jsonl")]
    return PipelineConfig(
        data=DataConfig(**{"train": sources, "valid_fraction": 0.2, **data}),
        filter=filtered,
        chunk=ChunkConfig(target_bytes=4000),
    )


def run(config: PipelineConfig, folder: Path) -> LocalExecutor:
    return run_locally(pipeline_stages, config, folder / "root", "chunk")


def documents_of(outputs: Sequence[Output]) -> list[str]:
    files = [output.path("text.txt") for output in outputs if output.json("texts.json")["kept"]]
    return [text for file in files for text in file.read_bytes().decode().split(EOT)[:-1]]


def passes(text: str) -> bool:
    rules = RulesConfig()
    return bool(first_failed_rule(compute_figures(pack_documents([text]), rules), rules)[0] < 0)


def test_both_texts_keep_the_documents_that_pass(tmp_path: Path) -> None:
    executor = run(make_config(tmp_path, replace(RULES_ON, keep_removed_text=True)), tmp_path)
    train, valid = executor.open("filter-train"), executor.open("filter-valid")
    kept = [*documents_of(train), *documents_of(valid)]
    assert documents_of(train) and documents_of(valid)
    rows = [row for output in (*train, *valid) for row in pq.read_table(output.path("removed.parquet")).to_pylist()]
    assert sorted([*kept, *(row["text"] for row in rows)]) == sorted(TEXTS)
    assert sorted(kept) == sorted(filter(passes, TEXTS))
    assert {row["reason"] for row in rows} <= {*RULES}
    assert {row["source"] for row in rows} == {str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl"), "held-out documents"}
    [result] = executor.open("filter")
    statistics = result.json("text_groups.json")["statistics"]
    for split, outputs in (("train", train), ("valid", valid)):
        assert statistics[split]["documents"] == len(documents_of(outputs)) == sum(statistics[split]["lengths"])
        assert statistics[split]["bytes"] == sum(len((text + EOT).encode()) for text in documents_of(outputs))
    chunks = [
        json.loads(line) for output in executor.open("chunk-train") for line in output.path("chunks.jsonl").open()
    ]
    assert sum(part["end"] - part["start"] for chunk in chunks for part in chunk) == statistics["train"]["bytes"]


def test_a_changed_limit_reruns_the_filter_and_what_depends_on_it(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    assert run(config, tmp_path).made == ["ingest-train", "ingest", *MADE]
    assert run(config, tmp_path).made == []
    stricter = replace(config, filter=FilterConfig(RulesConfig(min_characters=len(good(10)))))
    made = run(stricter, tmp_path).made
    assert made[:4] == MADE[:4] and made[-1] == "chunk", "documents with a short number are gone"
    same = replace(config, filter=FilterConfig(RulesConfig(gopher_min_words=49)))
    assert run(same, tmp_path).made == MADE[:3], "the text is the same, so chunks stay cached"


def test_validation_text_with_a_name_stays_as_it_is(tmp_path: Path) -> None:
    valid = write_text(tmp_path / "v.txt", "short" + EOT)
    executor = run(make_config(tmp_path, valid=[str(valid)]), tmp_path)
    assert executor.made == [
        "ingest-train",
        "ingest-valid",
        "ingest",
        *(name for name in MADE if name != "filter-valid"),
    ]
    [before], [after] = executor.open("ingest"), executor.open("filter")
    statistics = [output.json("text_groups.json")["statistics"]["valid"] for output in (before, after)]
    assert statistics[0] == statistics[1] and statistics[0]["documents"] == 1
    assert executor.open("chunk-valid")[0].manifest["figures"]["bytes"] == len("short" + EOT)
    assert "not filtered" in (after.page or "")


def test_an_interrupted_filter_goes_on_with_the_missing_group(tmp_path: Path) -> None:
    config, original, calls = make_config(tmp_path, valid_fraction=0), filter_texts, list[Any]()

    def stop_at_second(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*arguments)

    with patch("lm.text.ingest._MAX_GROUP_BYTES", 1):
        with patch("lm.curate.filtered_text.filter_texts", stop_at_second), pytest.raises(KeyboardInterrupt):
            run(config, tmp_path)
        assert run(config, tmp_path).made == ["filter-train", "filter", "chunk-train", "chunk-train", "chunk"]
    assert len(calls) == 2
    groups = tmp_path / "root" / "filter-group"
    attempts = [path for key in groups.iterdir() if key.is_dir() for path in key.iterdir() if path.is_dir()]
    assert len(attempts) == 2, "nothing is left of the interrupted attempt"


def test_text_of_a_special_token_stays_ordinary(tmp_path: Path) -> None:
    config = make_config(tmp_path, valid_fraction=0)
    typed = good(1) + " Who says <|user|> to the cat and the dog?"
    write_jsonl(tmp_path / "b.jsonl", json.dumps({"text": "short"}), json.dumps({"text": typed}))
    config = replace(config, tokenizer=TokenizerConfig(special_tokens=[EOT, "<|user|>"]))
    executor = run(config, tmp_path)
    [output] = executor.open("filter-train")
    texts = output.json("texts.json")
    [[start, end]] = texts["kept"][0]["rows"]
    assert output.path("text.txt").read_bytes()[start:end].decode() == typed + EOT
    assert texts["separator"] == EOT
    ranges = [part for line in executor.open("chunk-train")[0].path("chunks.jsonl").open() for part in json.loads(line)]
    assert [part["special_texts"] for part in ranges if part.get("separator")] == [1]


def test_the_page_shows_what_was_removed_and_escapes_it(tmp_path: Path) -> None:
    [output] = run(make_config(tmp_path, valid_fraction=0), tmp_path).open("filter")
    page = output.page or ""
    assert "| gopher_min_words | 50 | 2 |" in page
    assert f"| `{tmp_path / 'a.txt'}` |" in page
    assert "rules removed nothing: max_document_bytes, min" not in page
    assert "\x1b" not in page and "\u202e" not in page
    [line] = [line for line in page.splitlines() if "alert(1)" in line]
    assert r"\x1b[31m\u202e\n# Title\n" in line
    assert line.partition(": ")[2].startswith("`` <script>"), "as code, with a fence of its own"
    assert page.count("![") == 6 + line.count("![x]"), "six histograms"
    cut = [line for line in page.splitlines() if "This line" in line or "incomprehensibilities" in line]
    assert cut and all(len(line) < 500 for line in cut)


def test_a_filter_that_removes_everything_names_the_rule(tmp_path: Path) -> None:
    config = make_config(tmp_path, FilterConfig(RulesConfig(gopher_min_words=None, min_characters=10**6)))
    with pytest.raises(
        UserError, match=r"removes all documents of the training text, most of them \(\d+\) by the rule min_characters"
    ):
        run(config, tmp_path)


def test_without_rules_nothing_is_filtered_and_no_key_changes(tmp_path: Path) -> None:
    write_text(tmp_path / "a.txt", "".join(good(number) + EOT for number in range(40)))
    config = PipelineConfig(data=DataConfig(train=[str(tmp_path / "a.txt")]), chunk=ChunkConfig(target_bytes=4000))
    executor = run(config, tmp_path)
    assert not config.filter.is_on and "filter" not in config.stage_names()
    assert executor.made == ["ingest-train", "ingest", "chunk-train", "chunk-valid", "chunk"]
    parameters = {
        title: [out.manifest["ingredients"]["parameters"] for out in executor.open(title)] for title in executor.made
    }
    assert [*parameters.pop("ingest-train")[0]] == ["group", "fraction", "data"]
    keys = {title: json_digest(values)[:16] for title, values in parameters.items()}
    assert keys == {  # from before there was a filter
        "ingest": "ff895305d8eb8d2e",
        "chunk-train": "2daf7381da145e75",
        "chunk-valid": "726d186e57920c11",
        "chunk": "14b95de9e631e09d",
    }
