"""Fixtures of the tests of flows."""

from pathlib import Path

import pytest

from flows.config import PipelineConfig
from tests.helpers.pipelines import Runner, make_config


@pytest.fixture
def config(tmp_path: Path) -> PipelineConfig:
    return make_config(tmp_path)


@pytest.fixture
def run(tmp_path: Path) -> Runner:
    return Runner(tmp_path / "root")
