"""Roles that the modules of a model state for their parameters."""

import re
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from lm.model.transformer import TransformerLM
from tests.helpers.reference_model import MODEL_VARIANTS, SMALL_CONFIG

# Pattern of the name in the state dict → role. The first match counts.
ROLES = {
    "token_embeddings": "embedding",
    r"(ln1|ln2|ln1_out|ln2_out|ln_final|q_norm|k_norm|value_sum)\.weight$": "norm",
    r"\.bias$": "bias",
    "(q|k)_proj": "query_key",
    "(v|output)_proj": "value_output",
    r"ffn\.w[123]": "feed_forward",
    "lm_head": "head",
}


@pytest.mark.parametrize("variant", MODEL_VARIANTS, ids=str)
def test_parameter_roles_follow_names(variant: dict[str, Any]) -> None:
    model = TransformerLM(replace(SMALL_CONFIG, **variant), device="meta")
    names = [name for name, _ in model.named_parameters()]
    expected = {name: next(role for pattern, role in ROLES.items() if re.search(pattern, name)) for name in names}
    assert list(model.parameter_roles().items()) == list(expected.items())
    assert set(names) == set(model.state_dict())


def test_a_tied_matrix_has_the_role_embedding() -> None:
    model = TransformerLM(replace(SMALL_CONFIG, tied_embeddings=True), device="meta")
    assert model.parameter_roles()["token_embeddings.weight"] == "embedding"
    assert "head" not in model.parameter_roles().values()


def test_a_parameter_without_a_role_is_an_error() -> None:
    model = TransformerLM(SMALL_CONFIG, device="meta")
    model.layers[1].gate = nn.Linear(24, 24, bias=False)
    with pytest.raises(TypeError, match=r"layers\.1\.gate\.weight has no role.*Linear"):
        model.parameter_roles()
