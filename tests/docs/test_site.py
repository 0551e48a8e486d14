"""The documentation as a site: every option is in the reference, and a bad link fails the build."""

import logging
import re
import shutil
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from flows.config import PipelineConfig
from flows.posttrain import PosttrainConfig
from tools.option_reference import option_pages

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return option_pages()


def options(config: type[Any], prefix: str = "") -> Iterator[str]:
    """Yield the options of a configuration, without those of a section."""
    for field in fields(config):
        kind = get_type_hints(config)[field.name]
        section = next(filter(is_dataclass, (kind, *get_args(kind))), None)
        if isinstance(section, type):
            yield from options(section, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}"


def test_each_option_of_the_pipeline_is_in_the_reference(pages: dict[str, str]) -> None:
    names = [*options(PipelineConfig)]
    assert {"budget", "train.steps", "model.moe.top_k", "execution.runner"} <= {*names}
    missing = [name for name in names if f"### `--{name}` {{#{name}}}\n" not in pages["options-of-pipeline.md"]]
    assert missing == []


def test_a_section_of_two_configurations_is_described_once(pages: dict[str, str]) -> None:
    page = pages["options-of-posttrain.md"]
    trainings = [f"{name}.train." for name in ("distill", "preference", "reward_model", "reinforce", "ppo")]
    for name in options(PosttrainConfig):
        is_elsewhere = name.startswith(("sft.", "adapter.", "execution.", *trainings))
        assert (f"### `--{name}` " in page) != is_elsewhere, name
    assert "Its options are those of [train](options-of-pipeline.md#section-train)." in page


def test_an_option_has_its_type_bounds_default_and_meaning(pages: dict[str, str]) -> None:
    page, commands = pages["options-of-pipeline.md"], pages["commands.md"]
    assert "*integer, ≥ 1, default `5000`, in the preset `demo` `300`*\n\nOptimizer steps" in page
    assert "*swiglu or geglu or silu or relu2, default `swiglu`*" in page
    assert "### `--top_p` {#sample-top_p}\n\n*number, ≥ 0, ≤ 1, default `0.95`*" in commands
    assert "### `--max_batch_size` {#serve-max_batch_size}\n\n*integer, ≥ 1, ≤ 65536, default `16`*" in commands
    assert "### `--port` {#serve-port}\n\n*integer, default `8000`*\n\nport to listen on" in commands


def test_each_command_has_a_section_and_its_own_options(pages: dict[str, str]) -> None:
    page = pages["commands.md"]
    assert "## textmill export {#export}" in page and "textmill export PATH [options]" in page
    assert "`--train.steps`" not in page and "[options of pipeline](options-of-pipeline.md)" in page


def test_a_bad_link_is_an_error_of_the_build(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    docs = shutil.copytree(ROOT / "docs", tmp_path / "docs")
    links = "[a](gone.md) [b](lm.md#gone) [c](../pyproject.toml) [d](../benchmarks/RESULTS.md) [e](../examples)"
    (docs / "bad.md").write_text(f"# Bad\n\n{links}\n", encoding="utf-8")
    # Without the plugins, whose work takes most of the time.
    config = load_config(str(ROOT / "mkdocs.yml"), docs_dir=str(docs), site_dir=str(tmp_path / "site"), plugins=[])
    with caplog.at_level(logging.INFO, "mkdocs"):
        build(config)
    problems = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(problems) == 4 and all("bad.md" in problem for problem in problems), problems
    for part in ("are not included in the", "'gone.md'", "'lm.md#gone'", "'../pyproject.toml'"):
        assert sum(part in problem for problem in problems) == 1
    page = (tmp_path / "site" / "bad.html").read_text(encoding="utf-8")
    assert 'href="results.html"' in page and 'href="examples.html"' in page
    start = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert 'href="own-text.html"' in start and 'href="license.html"' in start
    assert re.findall(r'(?:src|<link[^>]* href)="https?:[^"]*"', start) == []  # a reader needs no network
