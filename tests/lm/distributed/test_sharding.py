"""The collectives for rows."""

from pathlib import Path

import pytest
import torch

from lm.distributed.sharding import shard_rows
from tests.helpers.ranks import run_ranks


def test_stacks_of_whole_matrices_are_divided_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lm.distributed.sharding.get_world_size", lambda: 4)
    loads = [0] * 4
    tensors = [torch.empty(shape) for shape in ((9, 2, 3), (3, 2, 3), (8, 8), (8, 8))]
    bounds = shard_rows(tensors, [True, True, True, False], loads)
    assert bounds[0] == [0, 2, 4, 6, 9]
    assert bounds[3] == [0, 2, 4, 6, 8]
    assert sorted(loads) == [0, 0, 4 * 18, 4 * 64], "fewer matrices than ranks stay together"
    assert {tuple(bounds[1]), tuple(bounds[2])} == {(0, 8, 8, 8, 8), (0, 0, 3, 3, 3)}


@pytest.mark.slow
def test_rows_are_gathered_and_averaged_without_much_padding(tmp_path: Path) -> None:
    """Also if one of three ranks has a whole matrix, and the others have nothing."""
    run_ranks("tests.helpers.row_exchange", tmp_path, world_size=3)
