"""The collectives for rows."""

from pathlib import Path

import pytest

from tests.helpers.ranks import run_ranks


@pytest.mark.slow
def test_rows_are_gathered_and_averaged_without_much_padding(tmp_path: Path) -> None:
    """Also if one of three ranks has a whole matrix, and the others have nothing."""
    run_ranks("tests.helpers.row_exchange", tmp_path, world_size=3)
