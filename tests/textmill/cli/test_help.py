"""The screen of commands, and a warm-up that shrinks with the steps."""

from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from flows.config import PipelineConfig, merge_fields
from textmill.cli.main import main
from textmill.cli.parser import _commands, build_parser, parse_command


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"]], ids=str)
def test_the_overview_is_one_screen(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert all(len(line) <= 80 for line in lines)
    words = {word for line in lines if line.startswith("  ") for word in line.split()}
    assert _commands(build_parser(only="none")).keys() <= words


def test_a_warm_up_that_nobody_set_shrinks_with_the_steps(capsys: pytest.CaptureFixture[str]) -> None:
    options = parse_command(["run", "--train.steps", "20"])[1]
    assert options.train.warmup_steps == 2  # the demo's is 30 of 300
    assert "train.warmup_steps: 30 → 2" in capsys.readouterr().err
    assert parse_command(["run", "--train.steps", "40"])[1].train.warmup_steps == 30
    options = parse_command(["posttrain", "--sft.steps", "5"])[1]
    assert 0 <= options.sft.warmup_steps < 5
    base = {"train": {"steps": 300, "warmup_steps": 30, "schedule": "cosine", "decay_fraction": 0.2}}
    for changes, warmup in (({"steps": 20}, 2), ({"steps": 20, "warmup_steps": 30}, 30), ({"batch_size": 3}, 30)):
        assert merge_fields(PipelineConfig, base, {"train": changes})["train"]["warmup_steps"] == warmup


def test_help_explains_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["run", "--help=all"])
    assert exit_info.value.code == 0
    text = capsys.readouterr().out

    def check(prefix: str, config: Any) -> None:
        for option in fields(config):
            name, value = f"{prefix}{option.name}", getattr(config, option.name)
            if is_dataclass(value):
                check(f"{name}.", value)
            elif prefix:
                block = text.partition(f"--{name} ")[2].partition("\n  --")[0]
                assert len(block.split()) > 4, f"{name} is not explained"

    check("", PipelineConfig())
