"""Fixtures that several test files share."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Read when Prefect is imported, which the tests of ``lm`` alone never do.
os.environ.setdefault("PREFECT_LOGGING_LEVEL", "CRITICAL")
os.environ.setdefault("PREFECT_SERVER_LOGGING_LEVEL", "CRITICAL")


@pytest.fixture(autouse=True)
def _logs_are_heard() -> None:
    """The commands keep the project's lines from the root logger, where pytest listens; each test starts anew."""
    for name in ("lm", "tasks", "flows"):
        logging.getLogger(name).propagate = True
        logging.getLogger(name).setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real text and GPT-2's vocabulary beside the checkout; tests that need it skip without it."""
    folder = Path(__file__).parents[2] / "shared" / "data"
    if not (folder / "gpt2_vocab.json").exists():
        pytest.skip("the text and vocabulary of ../shared/data are not here")
    return folder


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """A Prefect server and database of the tests' own."""
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=180):
        yield
