"""``textmill dialogs``: rows of fine-tuning data as the model will see them."""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lm.data.chat_template import add_chat_tokens, encode_dialog
from lm.data.dialog_preview import preview_file
from tests.helpers.corpora import write_jsonl
from tests.helpers.llamas import make_dialog, make_exported
from tests.helpers.tokenizers import make_tokenizer
from textmill.cli.dialogs import format_preview
from textmill.cli.main import main


def show(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["dialogs", "--show", *arguments]) == 0
    return capsys.readouterr().out


def test_rows_are_shown_in_the_template(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "dialogs.csv"
    path.write_text('instruction,input,output\nAdd.,1 + 1,2\nAdd.,1,\nHi.,,"Ho,\nso"\nX.,,Y\n')
    assert show(capsys, str(path), "--rows", "3") == (
        f"{path}: Alpaca rows (instruction, input, output)\n\n"
        "line 2\n<|user|>Add.\n\n1 + 1<|end|><|assistant|>⟦2<|end|>⟧\n\n"
        "line 3: left out: it has no usable output; Alpaca rows have instruction, output\n\n"
        "line 4\n<|user|>Hi.<|end|><|assistant|>⟦Ho,\nso<|end|>⟧\n\n"
        "Trained tokens are between ⟦ and ⟧.\n"
        "Of the 4 rows, 1 is damaged and left out:\n"
        "  line 3: it has no usable output; Alpaca rows have instruction, output\n\n"
    )


def test_answers_without_weight_and_prompts_of_pairs_are_not_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [*asked, answer, other, last] = make_dialog("a", "b", "c", "d", system="e")
    rows: list[Any] = [
        {"messages": [*asked, {**answer, "weight": 0}, other, last]},
        {"chosen": [*asked, answer, other, last], "rejected": [*asked, answer, other, {**last, "content": "f"}]},
    ]
    output = show(capsys, str(write_jsonl(tmp_path / "a.jsonl", *map(json.dumps, rows))))
    start = "<|system|>e<|end|><|user|>a<|end|><|assistant|>b<|end|><|user|>c<|end|><|assistant|>"
    assert f"line 1\n{start}⟦d<|end|>⟧\n" in output
    assert f"line 2, chosen\n{start}⟦d<|end|>⟧\n" in output and f"line 2, rejected\n{start}⟦f<|end|>⟧\n" in output
    assert output.endswith("None of the 2 rows is damaged.\n\n")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_trained_tokens_green_and_no_control_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    url = str(
        write_jsonl(tmp_path / "a.jsonl", json.dumps({"prompt": "\x1b]0;x\x07<|end|>\u202e", "response": "b\tc"}))
    )
    text = format_preview(preview_file(url, 3), url, Terminal())
    assert "\x1b[2m<|user|>\x1b[0m\\x1b]0;x\\x07<|end|>\\u202e\x1b[2m<|end|>\x1b[0m" in text
    assert "\x1b[32mb\tc\x1b[0m\x1b[32m<|end|>\x1b[0m" in text and "are \x1b[32mgreen\x1b[0m." in text
    monkeypatch.setenv("NO_COLOR", "1")
    assert "⟦b\tc<|end|>⟧" in format_preview(preview_file(url, 3), url, Terminal())


def test_long_messages_are_shown_without_their_middle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"prompt": "a" * 3000, "response": "b"}
    output = show(capsys, str(write_jsonl(tmp_path / "a.jsonl", json.dumps(row))))
    assert f"<|user|>{'a' * 1000} […1,000 characters…] {'a' * 1000}<|end|>" in output


def test_the_first_thousand_rows_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": "a", "response": "" if number % 50 == 40 else "b"} for number in range(1100)]
    output = show(capsys, str(write_jsonl(tmp_path / "a.jsonl", *map(json.dumps, rows))), "--rows", "1")
    assert "Of the first 1,000 rows, 20 are damaged and left out:\n  line 41: message 1 is blank\n" in output
    assert output.endswith("\n  and 10 more\n\n")


def test_a_model_counts_the_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_exported(tmp_path / "model")
    url = str(write_jsonl(tmp_path / "a.jsonl", json.dumps({"prompt": "the cat", "response": "sat on"})))
    output = show(capsys, url, "--model", str(tmp_path / "model"))
    encoded = encode_dialog(add_chat_tokens(make_tokenizer()), make_dialog("the cat", "sat on"))
    assert f"line 1: {len(encoded.ids)} tokens, {sum(encoded.is_target)} trained\n" in output


def test_what_the_context_of_a_model_leaves_out_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_exported(tmp_path / "model")  # with a context of 64 tokens
    long = "x" * 100
    rows = [
        {"prompt": "a", "response": long},
        {"prompt": long, "response": "a"},
        {"prompt": "a", "chosen": long, "rejected": "b"},
    ]
    url = str(write_jsonl(tmp_path / "a.jsonl", *map(json.dumps, rows)))
    output = show(capsys, url, "--model", str(tmp_path / "model"))
    context = "the model's context of 64 tokens"
    assert f"line 1: 105 tokens, 101 trained; cut: its last 40 tokens are beyond {context}\n" in output
    assert f"line 2: 105 tokens, 2 trained; left out: no answer within {context}\n" in output
    assert f"line 3, chosen: 105 tokens, 101 trained; left out: longer than {context}\n" in output
    assert "line 3, rejected: 6 tokens, 2 trained\n" in output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "a.json does not exist"),
        ("", "a.json has no rows; give a file of JSON Lines, a JSON array, CSV or Parquet."),
        ('[{"a": 1},', "a.json, row 2: not JSON: "),
    ],
)
def test_bad_files_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / "a.json").write_text(text)
    assert main(["dialogs", "--show", str(tmp_path / "a.json")]) == 2
    assert message in capsys.readouterr().err


def test_a_file_of_other_rows_says_what_it_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = show(capsys, str(write_jsonl(tmp_path / "a.jsonl", '{"text": "a"}')))
    assert (
        "no row can be used\n\nline 1: left out: its fields with a value are 'text'; it needs those of a form" in output
    )


def test_without_a_model_no_slow_library_is_imported(tmp_path: Path) -> None:
    url = str(write_jsonl(tmp_path / "a.jsonl", '{"prompt": "a", "response": "b"}'))
    code = (
        "import sys\nfrom textmill.cli.main import main\n"
        f"main(['dialogs', '--show', {url!r}])\n"
        "print(sorted({'torch', 'numba', 'prefect', 'pyarrow', 'transformers'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "⟦b<|end|>⟧" in done.stdout and done.stdout.endswith("\n[]\n")
