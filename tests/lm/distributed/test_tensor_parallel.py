"""A training with tensor parallelism equals the training in one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from lm.common.errors import UserError
from lm.distributed import apply_tensor_parallel
from lm.model.config import ModelConfig
from lm.model.transformer import TransformerLM
from tests.helpers.model_parallel import Case, Kind, check_cases


class MeshStub:
    """A mesh of which only the shape is read."""

    def __init__(self, *shape: int) -> None:
        self.shape, self.ndim = shape, len(shape)

    def size(self) -> int:
        return self.shape[0]


def model_with(**fields: Any) -> TransformerLM:
    return TransformerLM(ModelConfig(**{"vocab_size": 33, "d_model": 48, "num_heads": 4, "d_ff": 64} | fields))


@pytest.mark.slow
def test_two_processes_have_the_weights_of_one(tmp_path: Path) -> None:
    cases = [
        Case("tensor", has_qk_norm=True, has_biases=True),
        Case("tensor", is_tied=True, num_kv_heads=4, logit_softcap=3.0, has_checkpointing=True),
        Case("tensor", is_double=False, optimizer="torch.AdamW"),
        Case("tensor", optimizer="muon", has_found_inf=True),
        Case("tensor", is_gemma=True, has_qk_norm=True),
        Case("tensor", has_value_residual=True, num_kv_heads=2),
    ]
    check_cases(tmp_path, cases, 2)


@pytest.mark.long
@pytest.mark.parametrize("is_double", [True, False])
def test_four_processes_have_the_weights_of_one(tmp_path: Path, is_double: bool) -> None:
    kinds: list[tuple[Kind, int]] = [("tensor", 8), ("tensor", 4), ("tensor+fsdp", 2)]
    cases = [
        Case(kind, is_tied, num_kv_heads, has_qk_norm=is_tied, has_checkpointing=is_tied, is_double=is_double, steps=10)
        for kind, num_kv_heads in kinds
        for is_tied in (False, True)
    ]
    cases.append(Case("tensor", feed_forward="relu2", norm_placement="post", logit_softcap=3.0, is_double=is_double))
    cases.append(Case("tensor", optimizer="torch.AdamW", is_double=is_double))
    cases.append(Case("tensor", optimizer="muon", is_double=is_double))
    check_cases(tmp_path, cases, 4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "model.num_heads 4 cannot be divided among 3 processes"),
        (
            {"qk_norm": True, "qk_norm_per_head": False},
            "qk_norm_per_head false cannot be divided by tensor",
        ),
        ({"num_heads": 6, "num_kv_heads": 2}, "model.num_kv_heads 2 cannot be divided among 3 processes"),
        ({"num_heads": 6}, "model.d_ff 64 cannot be divided among 3 processes"),
        ({"num_heads": 6, "d_ff": 48, "vocab_size": 4}, "model.vocab_size 4 is too small"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused(fields: dict[str, int], message: str) -> None:
    mesh: DeviceMesh = MeshStub(3)  # type: ignore[assignment]
    with pytest.raises(UserError, match=message):
        apply_tensor_parallel(model_with(**fields), mesh)


def test_a_mesh_of_two_dimensions_is_refused() -> None:
    mesh: DeviceMesh = MeshStub(2, 2)  # type: ignore[assignment]
    with pytest.raises(UserError, match="2 dimensions"):
        apply_tensor_parallel(model_with(), mesh)


def test_a_model_that_was_refused_is_unchanged() -> None:
    model, ids = model_with(), torch.zeros(1, 4, dtype=torch.long)
    expected = model(ids)
    mesh: DeviceMesh = MeshStub(3)  # type: ignore[assignment]
    with pytest.raises(UserError):
        apply_tensor_parallel(model, mesh)
    torch.testing.assert_close(model(ids), expected)
