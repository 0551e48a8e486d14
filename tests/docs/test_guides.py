"""The README and the guides are true: their Python runs, their commands parse, their links lead somewhere."""

import functools
import re
import shlex
from pathlib import Path

import pytest

from lm.text.demo_corpus import demo_stories
from tests.helpers.ranks import run_ranks
from textmill.cli.parser import build_parser, parse

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")] + sorted((ROOT / "docs").glob("*.md"))


def code_blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900


def test_the_python_of_the_guide_to_lm_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("corpus.txt").write_text("".join(demo_stories(50)), encoding="utf-8")
    blocks = code_blocks(ROOT / "docs" / "lm.md", "python")
    assert len(blocks) == 4
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "lm.md", "exec"), names)
    assert (tmp_path / "my-tokenizer" / "tokenizer.json").exists()


@pytest.mark.parametrize("block", code_blocks(ROOT / "docs" / "curation.md", "python"))
def test_the_python_of_the_guide_to_curation_runs(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "extract_text" in block:
        pytest.importorskip("resiliparse", reason="resiliparse is not installed")
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "curation.md", "exec"), {})


@pytest.mark.slow  # torchrun itself is in tests/lm/distributed/test_launch.py
@pytest.mark.parametrize("number", range(2))
def test_the_python_of_the_guide_to_gpus_runs_in_two_processes(tmp_path: Path, number: int) -> None:
    script = tmp_path / "train_divided.py"
    script.write_text(code_blocks(ROOT / "docs" / "gpus.md", "python")[number], encoding="utf-8")
    output = run_ranks("tests.helpers.rank_script", tmp_path, str(script), world_size=2)
    assert re.findall(r"^loss \d\.\d{3}, (\d+) tensors$", output, re.MULTILINE) == ["39"], output


def test_every_room_is_in_the_guide_to_lm() -> None:
    named = set(re.findall(r"^\| `lm\.(\w+)` \|", (ROOT / "docs" / "lm.md").read_text(encoding="utf-8"), re.MULTILINE))
    assert named == {path.parent.name for path in (ROOT / "lm").glob("*/__init__.py")}


def commands() -> list[str]:
    lines = [line for page in PAGES for block in code_blocks(page, "bash") for line in block.splitlines()]
    return [line.split("&&")[-1].split("  #")[0].partition(" > ")[0].strip() for line in lines if "textmill " in line]


@pytest.mark.slow
def test_the_commands_parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    yaml = code_blocks(ROOT / "docs" / "own-text.md", "yaml")[0]
    for name in ("mine.yaml", "big.yaml"):
        Path(name).write_text(yaml, encoding="utf-8")
    assert len(commands()) >= 20
    parser_of = functools.cache(build_parser)  # it takes part of a second to build one
    for command in commands():
        words = shlex.split(command)
        if not re.search(r"help(=\w+)?$", words[-1]) and "--print_config" not in words:
            preset = words[words.index("--preset") + 1] if "--preset" in words else "demo"
            parse(parser_of(preset, only=words[1]), words[1:])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_module_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text) + re.findall(r'src="([^"]+)"', text)
    assert [link for link in links if not (page.parent / link).exists()] == []
    paths = re.findall(r"`((?:lm|tasks|flows|tests|benchmarks|docs|\.ci)/[\w./]+)`", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []
    modules = re.findall(r"python -m ((?:lm|tasks|tests|benchmarks)[\w.]*)", text)
    missing = [
        m for m in modules if not any((ROOT / (m.replace(".", "/") + end)).exists() for end in (".py", "/__main__.py"))
    ]
    assert missing == []
