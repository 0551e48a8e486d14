"""Fixtures that several test files share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real text and GPT-2's vocabulary beside the checkout; tests that need it skip without it."""
    folder = Path(__file__).parents[2] / "shared" / "data"
    if not (folder / "gpt2_vocab.json").exists():
        pytest.skip("the text and vocabulary of ../shared/data are not here")
    return folder
