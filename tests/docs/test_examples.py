"""The programs in ``examples/``: short, on public names alone, and with the figure that they promise."""

import ast
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
ROOMS = {
    "checkpoint",
    "data",
    "distributed",
    "eval",
    "inference",
    "model",
    "optim",
    "posttrain",
    "text",
    "tokenizer",
    "train",
}
FIGURES = {
    "bpe": ("bytes per token", 2.5, 3.5),
    "pretrain": ("bits per byte", 0.1, 0.35),
    "sample": ("greedy agreement", 0.95, 1),
    "fine_tune": ("accuracy", 0.9, 1),
    "grpo": ("accuracy after", 0.8, 1),
    "ddp": ("largest difference", 0, 1e-5),
}


def test_each_example_is_named_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(FIGURES)


@pytest.mark.parametrize("name", FIGURES)
def test_an_example_is_short_and_imports_public_names_only(name: str) -> None:
    source = (EXAMPLES / f"{name}.py").read_text()
    assert len(source.splitlines()) <= 80 and source.endswith('\n\nif __name__ == "__main__":\n    main()\n')
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    modules = [str(node.module).split(".") for node in imports if str(node.module).startswith("lm")]
    assert modules and all(len(parts) == 2 and parts[1] in ROOMS for parts in modules)


@pytest.mark.slow
@pytest.mark.parametrize("name", FIGURES)
def test_an_example_prints_its_figure(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One runs as a program; the others in this process, which has imported torch."""
    if name == "bpe":
        command = [sys.executable, str(EXAMPLES / f"{name}.py")]
        output = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout
    else:
        monkeypatch.syspath_prepend(EXAMPLES)
        import_module(name).main()
        output = capsys.readouterr().out
    label, lowest, highest = FIGURES[name]
    figures = re.findall(rf"^{label}: (\S+)$", output, re.MULTILINE)
    assert len(figures) == 1 and lowest <= float(figures[0]) <= highest
