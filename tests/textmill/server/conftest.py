"""A server for the tests of several files."""

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    from tests.helpers.completion_server import CONTEXT, run_server  # skips where OpenAI's client is not installed
    from tests.helpers.generating import make_model

    with run_server(make_model(257, CONTEXT).eval()) as running:
        yield running
