"""The stage ``dialogs``: sources that change while it runs, rows that are not used, and what follows from none."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from lm.common.errors import UserError
from lm.posttrain.config import DialogsConfig
from lm.train.config import TrainConfig
from tasks.dialogs import dialogs
from tasks.posttrain import make_posttrain_job
from tasks.runtime.output import Output, read_output
from tests.helpers.corpora import write_jsonl
from tests.helpers.ingesting import sources
from tests.helpers.roots import materialize, run_context


def test_a_source_that_changed_after_hashing_raises_a_user_error(tmp_path: Path) -> None:
    rows = [json.dumps({"prompt": f"question {number}", "response": "answer"}) for number in range(2)]
    url = write_jsonl(tmp_path / "a.jsonl", rows[0])
    given_sources = sources(url)
    write_jsonl(tmp_path / "a.jsonl", *rows)
    with pytest.raises(UserError, match=r"a\.jsonl changed while the pipeline ran; run it again"):
        materialize(dialogs, run_context(tmp_path / "root"), given_sources, [], [], [], DialogsConfig(train=[url]))
    assert materialize(dialogs, run_context(tmp_path / "root"), sources(url), [], [], [], DialogsConfig(train=[url]))


GOOD = [{"prompt": f"question {number}", "response": "answer"} for number in range(20)]
BLANK = {"prompt": "question", "response": " "}
HELD_OUT = {"prompt": "question 0", "response": "another answer"}


def run_dialogs(tmp_path: Path, rows: list[Any], valid: list[Any] | None = None, **fields: Any) -> Output:
    names = [
        [write_jsonl(tmp_path / f"{name}.jsonl", *map(json.dumps, part))] if part else []
        for name, part in (("train", rows), ("valid", valid))
    ]
    config = DialogsConfig(train=names[0], valid=names[1], valid_fraction=0, **fields)
    run = run_context(tmp_path / "root")
    return read_output(run.store, materialize(dialogs, run, *(sources(*part) for part in names), [], [], config))


@pytest.mark.parametrize("field", ["train", "valid"])
def test_rows_that_are_not_used_are_a_warning_or_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, field: str
) -> None:
    def run(rows: list[Any], **fields: Any) -> Output:
        caplog.clear()
        return run_dialogs(tmp_path, rows, **fields) if field == "train" else run_dialogs(tmp_path, [], rows, **fields)

    with caplog.at_level(logging.WARNING):
        assert run([*GOOD, *GOOD, BLANK]).manifest["figures"]["damaged"] == 1
        assert not caplog.text
        assert run([*GOOD, BLANK, BLANK]).manifest["figures"]["damaged"] == 2
        assert f"2 of 22 rows of dialogs.{field} are not used: 2 are damaged (" in caplog.text
        assert "line 21: message 1 is blank; " in caplog.text
        assert run([*GOOD, *[BLANK] * 20]).manifest["figures"]["damaged"] == 20
        assert f"20 of 40 rows of dialogs.{field}" in caplog.text
        message = rf"21 of 41 rows of dialogs\.{field} are not used: 21 are damaged .* dialogs\.max_unused_fraction "
        with pytest.raises(UserError, match=message):
            run([*GOOD, *[BLANK] * 21])
        output = run([*GOOD, *[BLANK] * 21], max_unused_fraction=1.0)
        assert output.manifest["figures"]["dialogs"][field] == 20 and "21 of 41 rows" in caplog.text


def test_rows_that_ask_what_is_held_out_are_a_warning_or_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        figures = run_dialogs(tmp_path, [*GOOD, BLANK], GOOD[:1]).manifest["figures"]
    assert (figures["dialogs"], figures["left_out"]) == ({"train": 19, "valid": 1}, 1)
    message = (
        "2 of 21 rows of dialogs.train are not used: 1 ask the same as a held-out example or a tested problem, and 1"
    )
    assert message in caplog.text
    with pytest.raises(UserError, match=r"11 of 20 rows of dialogs\.train are not used: 11 ask the same as a held-out"):
        run_dialogs(tmp_path, [HELD_OUT, *GOOD[1:]], GOOD[:11])


def test_rows_in_the_forms_that_people_have_are_stored_in_our_own(tmp_path: Path) -> None:
    (tmp_path / "alpaca.json").write_text(
        json.dumps([{"instruction": "Add.", "input": "1 + 1", "output": "2"}], indent=1)
    )
    (tmp_path / "pairs.csv").write_text('prompt,chosen,rejected\n"Hi, you.",Ho.,No.\n')
    names = [str(tmp_path / name) for name in ("alpaca.json", "pairs.csv")]
    run = run_context(tmp_path / "root")
    config = DialogsConfig(train=names, valid_fraction=0)
    output = read_output(run.store, materialize(dialogs, run, sources(*names), [], [], [], config))
    [dialog] = [json.loads(line) for line in output.path("dialogs-train.jsonl").read_text().splitlines()]
    asked = {"role": "user", "content": "Add.\n\n1 + 1"}
    assert dialog == {"messages": [asked, {"role": "assistant", "content": "2"}], "question": None}
    [pair] = [json.loads(line) for line in output.path("pairs-train.jsonl").read_text().splitlines()]
    assert pair == {"prompt": [{"role": "user", "content": "Hi, you."}], "chosen": "Ho.", "rejected": "No."}


def test_the_option_that_accepts_unused_rows_does_not_change_the_key(tmp_path: Path) -> None:
    first = run_dialogs(tmp_path, GOOD)
    assert run_dialogs(tmp_path, GOOD, max_unused_fraction=1.0).ref == first.ref


def test_a_method_without_examples_says_why(tmp_path: Path) -> None:
    def start(method: Any, data: Output) -> None:
        make_posttrain_job(None, method, None, None, data, TrainConfig())  # type: ignore[arg-type]

    named = run_dialogs(tmp_path, GOOD[:1], GOOD[:1], max_unused_fraction=1.0)
    with pytest.raises(
        UserError,
        match=r"No dialogs are left to train on in the stage sft: 1 are held out, 1 ask the same .*in dialogs\.train",
    ):
        start("sft", named)
    with pytest.raises(UserError, match=r"There are no pairs for the stage preference\. Name some in dialogs\.train"):
        start("preference", run_dialogs(tmp_path, GOOD))
    with pytest.raises(UserError, match=r"There are no problems for the stage reinforce\. Name some in dialogs\.task"):
        start("reinforce", run_dialogs(tmp_path, GOOD))
