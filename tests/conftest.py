"""Fixtures that several test files share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import flows.cli  # noqa: F401: sets what Prefect logs, before Prefect is imported
from prefect.testing.utilities import prefect_test_harness  # isort: skip


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
    with prefect_test_harness(server_startup_timeout=180):
        yield
