"""What the README shows works: its Python runs, the commands it names parse, the files it names exist."""

import re
import shlex
from pathlib import Path

import pytest

from flows.cli import build_parser
from lm.demo_corpus import demo_stories

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("corpus.txt").write_text("".join(demo_stories(50)), encoding="utf-8")
    code = blocks("python")
    assert len(code) == 3
    for block in code:
        exec(compile(block, "README.md", "exec"), {})
    assert (tmp_path / "my-tokenizer" / "tokenizer.json").exists()


def test_the_commands_parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("train: {steps: 3}\n")
    commands = [
        line.split("&&")[-1].split("  #")[0].strip()
        for block in blocks("bash")
        for line in block.splitlines()
        if "textmill " in line
    ]
    assert len(commands) >= 9
    for command in commands:
        words = shlex.split(command)
        if "--help" not in words and "--print_config" not in words:
            preset = words[words.index("--preset") + 1] if "--preset" in words else "demo"
            build_parser(preset).parse_args(words[1:])


def test_the_modules_named_are_all_there_are() -> None:
    table = README.partition("| module | subject |")[2].partition("\n\n")[0]
    named = set(re.findall(r"`(\w+)`", table))
    assert named == {path.stem for path in (ROOT / "lm").iterdir() if path.name != "__pycache__"} - {
        "__init__",
        "errors",
        "execution",
        "demo_corpus",
    }
