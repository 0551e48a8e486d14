"""textmill tokenizers: the files, the page and the summary of a comparison."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib.text import Text
from prefect.artifacts import Artifact

from flows.compare_tokenizers import compare
from lm.common.errors import UserError
from lm.tokenizer.bpe import train_bpe
from lm.tokenizer.compare import Comparison
from lm.tokenizer.tokenizer import Tokenizer
from tasks.pages.tokenizer import comparison_page
from tasks.runs.models import resolve_tokenizer
from textmill.cli.main import main
from textmill.cli.tables import format_comparison


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a directory with two texts and with tokenizers in several formats."""
    (tmp_path / "plain.txt").write_text("The cat sat. " * 50 + "<|endoftext|>The dog ran.<|endoftext|>")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "Ein Hund lief über die Straße. " * 50}) + "\n")
    for name, size in (("small", 260), ("large", 300)):
        vocab, merges = train_bpe(tmp_path / "plain.txt", size, ["<|endoftext|>"])
        Tokenizer(vocab, merges, ["<|endoftext|>"]).save(tmp_path / name)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        (tmp_path / "small" / name).unlink()  # GPT-2's files are left
    Tokenizer({n: bytes([n]) for n in range(256)}, []).save_tiktoken(tmp_path / "bytes.tiktoken")
    return tmp_path


def test_the_command(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = place / "out"
    tokenizers = [str(place / "small"), f"big={place / 'large'}", str(place / "bytes.tiktoken")]
    texts = ["--text", str(place / "plain.txt"), "--text", f"german={place / 'rows.jsonl'}"]
    assert main(["tokenizers", *tokenizers, *texts, "--root", str(place / "root"), "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"bytes per token +bytes +small +big +bytes\n", shown)
    content = json.loads((out / "comparison.json").read_text())
    assert content["texts"]["german"] == {"bytes": 1650, "characters": 1550}
    figures = {name: content["tokenizers"][name]["encodings"]["plain"] for name in ("small", "big", "bytes")}
    small, big, plain = (figures[name]["tokens"] for name in figures)
    assert figures["small"]["bytes_per_token"] == 663 / small
    assert plain == 663 > small > big
    assert re.search(rf"^plain +663 +{663 / small:.3f} +{663 / big:.3f} +1.000$", shown, re.MULTILINE)
    page = (out / "comparison.md").read_text()
    assert page.count("](data:image/png;base64,") == 2 and "| german |" in page


def test_names_are_drawn_and_written_as_they_are(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place / "small")
    (place / "small" / "_$a$.txt").write_text("some words")
    result = compare(
        ["."], ["_$a$.txt", os.fsdecode(b"a\xff=_$a$.txt"), ".hidden=_$a$.txt"], str(place), str(place / "out")
    )
    assert list(result.comparison.tokenizers) == ["small"]
    assert list(result.comparison.texts) == ["_$a$", "a\N{REPLACEMENT CHARACTER}", ".hidden"]
    drawn: list[tuple[str, bool]] = []
    monkeypatch.setattr(Text, "draw", lambda text, renderer: drawn.append((text.get_text(), text.get_parse_math())))
    [*comparison_page(Comparison(result.comparison.texts, {"_$b$": result.comparison.tokenizers["small"]}))]
    assert {("_$a$", False), ("_$b$", False)} <= set(drawn)


def test_documents_are_joined_by_line_breaks_and_a_file_may_have_an_equals_sign(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    Path("lang=de").mkdir()
    Path("lang=de/part.jsonl").write_text('{"text": "hello"}\n{"text": ""}\n{"text": "world\\n"}\n')
    result = compare(["small"], ["lang=de/part.jsonl", "lang=plain.txt"], str(place), str(place / "out"))
    texts = {"part": "hello\n\nworld\n", "lang": "The cat sat. " * 50 + "\nThe dog ran."}
    assert {label: length for label, (_, length) in result.comparison.texts.items()} == {
        label: len(text) for label, text in texts.items()
    }
    monkeypatch.setattr("flows.compare_tokenizers._MAX_CHARACTERS", 7)
    result = compare(["small"], ["lang=plain.txt"], str(place), str(place / "out"))
    assert result.comparison.texts["lang"] == (7, 7)


@pytest.mark.usefixtures("prefect_server")
def test_the_flow_publishes_the_page(place: Path) -> None:
    from flows.compare_tokenizers import tokenizers

    result = tokenizers([str(place / "large")], [str(place / "plain.txt")], str(place / "root"), str(place / "out"))
    artifact: Any = Artifact.get("comparison-tokenizers")
    assert artifact and result.page in str(artifact.data)


@pytest.mark.usefixtures("prefect_server")
def test_models_are_trained_with_the_same_flops_and_then_cached(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from flows.compare_tokenizers import Trainings, tokenizers

    monkeypatch.chdir(place)
    Path("valid.txt").write_text("The cat sat on the mat, and the dog ran away. " * 60)
    trainings = Trainings(["demo:300"], 1.5e10, seeds=2)
    arguments: Any = ["small"], ["valid.txt"], "root", "out"
    result = tokenizers(*arguments, trainings)
    small = result.losses["small"]
    assert len(set(small.seeds)) == 2 and small.error
    assert small.flops == pytest.approx(1.5e10, rel=0.02)
    figures = json.loads(Path("out/comparison.json").read_text())["tokenizers"]["small"]["equal_flops"]
    assert figures["bits_per_byte"] == sum(small.seeds) / 2 and figures["standard_error"] == small.error
    assert f"| {small.bits_per_byte:.4f} |" in Path("out/comparison.md").read_text()
    assert re.search(rf"^small +{small.bits_per_byte:.4f} +{small.error:.4f} +2 ", format_comparison(result), re.M)
    caplog.clear()
    assert tokenizers(*arguments, trainings).losses == result.losses
    assert "Running trial" not in caplog.text
    vocab = dict(enumerate([*(bytes([n]) for n in range(256)), b"th", *(f"word{n}".encode() for n in range(9000))]))
    Tokenizer(vocab, [(b"t", b"h")]).save("wide")
    with pytest.raises(UserError, match=r"FLOPs pay for .* of a model with the .* ids of wide"):
        tokenizers(["small", "wide"], ["valid.txt"], "root", "out", trainings)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--train_flops", "1e12"], "name the text to train on"),
        (["--train_text", "demo:10"], "are for trainings"),
        (["--seeds", "2"], "are for trainings"),
        (["--train_flops", "0", "--train_text", "demo:10"], "train_flops"),
    ],
)
def test_options_of_trainings_that_do_not_fit(
    place: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["tokenizers", str(place / "small"), "--text", str(place / "plain.txt"), "--root", str(place / "root")]
    assert main([*arguments, *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{0}/small", "{0}/small", "--text", "{0}/plain.txt"], "Two tokenizers are called small; give one a label"),
        (["{0}/small", "--text", "{0}/missing.txt"], "missing.txt"),
        (["{0}/smal", "--text", "{0}/plain.txt"], "There is no tokenizer '.*smal'"),
        (["--text", "{0}/plain.txt"], "has no tokenizer; make one with: textmill run"),
        (["{0}/plain.txt", "--text", "{0}/plain.txt"], "plain.txt"),
        (["{0}/small", "--text", "{0}/plain.txt", "--out", "{0}/plain.txt"], "cannot be written to"),
    ],
)
def test_mistakes(place: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [argument.format(place) for argument in arguments]
    assert main(["tokenizers", *arguments, "--root", str(place / "root")]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_damaged_file_is_named(place: Path) -> None:
    (place / "large" / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"large/tokenizer\.json"):
        resolve_tokenizer(str(place / "large"), str(place / "root"))
