"""The stage ``decontaminate``: training text that is also in the validation text, or in files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from flows.config import PipelineConfig
from flows.pipeline import pipeline_stages
from lm.common.errors import UserError
from lm.curate.config import DecontaminateConfig
from lm.text.config import ChunkConfig, DataConfig
from tests.helpers.corpora import EOT, write_jsonl, write_text
from tests.helpers.local_executor import LocalExecutor, run_locally
from tests.tasks.test_deduplicate import chunked_text, story

QUESTION = "How many <b>sheep</b> | `does` the farmer\x1b have left when all but nine of the seventeen run away?"
QUIZ = f"Riddle! {QUESTION.upper()} Tell us."
OF_VALIDATION = f"Before. {story(7)} After."


def make_config(folder: Path, **fields: Any) -> PipelineConfig:
    train = [story(0), OF_VALIDATION, story(1), QUIZ, "short"]
    write_text(folder / "train.txt", "".join(text + EOT for text in train))
    write_text(folder / "valid.txt", story(7) + EOT + "short" + EOT)
    write_text(folder / "test.txt", QUESTION + EOT)
    data = DataConfig(train=[str(folder / "train.txt")], valid=[str(folder / "valid.txt")])
    protect = DecontaminateConfig(**{"validation": True, "files": [str(folder / "test.txt")], **fields})
    return PipelineConfig(data=data, decontaminate=protect, chunk=ChunkConfig(target_bytes=4000))


def run(config: PipelineConfig, folder: Path) -> LocalExecutor:
    return run_locally(pipeline_stages, config, folder / "root", "chunk")


def test_documents_that_share_words_are_dropped_and_listed(tmp_path: Path) -> None:
    executor = run(make_config(tmp_path), tmp_path)
    assert chunked_text(executor) == [story(0), story(1), "short"]
    [output], [group] = executor.open("decontaminate")[-1:], executor.open("decontaminate")[:1]
    rows = pq.read_table(group.path("shared.parquet")).to_pylist()
    assert [row["protected"] for row in rows] == ["validation text", str(tmp_path / "test.txt")]
    text = (tmp_path / "train.txt").read_bytes()
    for row, document in zip(rows, (OF_VALIDATION, QUIZ), strict=True):
        assert text[row["start"] : row["start"] + row["bytes"]].decode() == document
        shared = document.encode()[row["shared_start"] : row["shared_start"] + row["shared_bytes"]].decode()
        assert shared.lower().strip(". \n?") in f"{story(7)} {QUESTION}".lower()
    statistics = output.json("text_groups.json")["statistics"]
    assert (statistics["train"]["documents"], statistics["valid"]["documents"]) == (3, 2)
    assert statistics["train"]["bytes"] == sum(len((text + EOT).encode()) for text in chunked_text(executor))
    page = output.page or ""
    assert "| 2 | 5 | 40.00 % |" in page and "\x1b" not in page
    assert "\\x1b" in page and "`` HOW MANY <B>SHEEP</B>" in page


def test_shared_words_are_cut(tmp_path: Path) -> None:
    executor = run(make_config(tmp_path, action="cut"), tmp_path)
    texts = chunked_text(executor)
    assert texts[0::2] == [story(0), story(1), "short"]
    assert texts[1].split() == ["Before.", ".", "After."] and texts[3] == "Riddle! ? Tell us."


def test_what_is_protected_decides_what_reruns(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    made = ["ingest-train", "ingest-valid", "ingest", "decontaminate", "decontaminate"]
    assert run(config, tmp_path).made == [*made, "chunk-train", "chunk-valid", "chunk"]
    assert run(config, tmp_path).made == []
    write_text(tmp_path / "test.txt", "Another question, of as many words as it takes, that no document has" + EOT)
    assert run(config, tmp_path).made[:2] == ["decontaminate", "decontaminate"]
    only_valid = run(replace(config, decontaminate=DecontaminateConfig(validation=True)), tmp_path)
    assert chunked_text(only_valid) == [story(0), story(1), QUIZ, "short"]
    off = replace(config, decontaminate=DecontaminateConfig())
    assert not off.decontaminate.is_on and "decontaminate" not in off.stage_names()


def test_problems_of_a_task_are_protected(tmp_path: Path) -> None:
    problem = {"question": QUESTION, "answer": "Nine are left.\n#### 9"}
    url = write_jsonl(tmp_path / "gsm8k.jsonl", json.dumps(problem), '{"question": 3}')
    config = make_config(tmp_path, files=[], validation=False, tasks={"gsm8k": [str(url)]})
    executor = run(config, tmp_path)
    assert chunked_text(executor) == [story(0), OF_VALIDATION, story(1), "short"]
    assert f"| `gsm8k: {url}` | 1 |" in (executor.open("decontaminate")[-1].page or "")
    with pytest.raises(UserError, match=r"decontaminate\.tasks has addition:1-2, whose problems are generated"):
        run(make_config(tmp_path, tasks={"addition:1-2": [str(url)]}), tmp_path)
    with pytest.raises(UserError, match=r"There is no task 'gsm8'.*did you mean 'gsm8k'"):
        run(make_config(tmp_path, tasks={"gsm8": [str(url)]}), tmp_path)
