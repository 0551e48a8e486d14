"""A larger vocabulary: old rows stay, new rows are near the mean of the old ones. A smaller one: rows are removed."""

import pytest
import torch

from lm.common.errors import UserError
from lm.model import TransformerLM
from lm.model.config import ModelConfig
from lm.model.transformer import grow_vocabulary, shrink_vocabulary


def make_model(tied: bool = False, dtype: torch.dtype | None = None) -> TransformerLM:
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=50, context_length=8, d_model=16, num_layers=1, num_heads=2, d_ff=8, tied_embeddings=tied
    )
    return TransformerLM(config, dtype=dtype)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_old_logits_stay_and_new_rows_are_near_the_mean(tied: bool, dtype: torch.dtype) -> None:
    model, ids = make_model(tied, dtype), torch.arange(8)[None]
    old_logits, old_rows = model(ids), model.token_embeddings.weight.detach().clone()
    grow_vocabulary(model, 54, seed=1)
    assert model.config.vocab_size == 54 and model(ids).shape == (1, 8, 54)
    torch.testing.assert_close(model(ids)[..., :50], old_logits)
    for weight in {model.token_embeddings.weight, model.head_weight}:
        assert weight.shape == (54, 16) and weight.dtype == dtype and weight.requires_grad
        distance = (weight[50:].float() - weight[:50].float().mean(0)).abs() / weight[:50].float().std(0)
        assert 0 < distance.mean() < 0.02
    assert torch.equal(model.token_embeddings.weight[:50], old_rows)
    assert (model.lm_head is None) is tied


def test_the_seed_decides() -> None:
    rows = []
    for seed in (1, 1, 2):
        model = make_model()
        grow_vocabulary(model, 53, seed)
        rows.append(model.token_embeddings.weight[50:])
    assert torch.equal(rows[0], rows[1]) and not torch.equal(rows[0], rows[2])
    assert not torch.equal(rows[0][0], rows[0][1])


def test_a_grown_model_equals_a_new_one_with_its_weights() -> None:
    model = make_model()
    grow_vocabulary(model, 60, seed=0)
    other = TransformerLM(model.config)
    other.load_state_dict(model.state_dict())
    ids = torch.tensor([[59, 0, 55]])
    assert torch.equal(other(ids), model(ids))


def test_the_same_size_and_a_smaller_one() -> None:
    model = make_model()
    before = model.token_embeddings.weight.detach().clone()
    grow_vocabulary(model, 50, seed=0)
    assert torch.equal(model.token_embeddings.weight, before)
    with pytest.raises(UserError, match="cannot shrink to 49"):
        grow_vocabulary(model, 49, seed=0)


@pytest.mark.parametrize("tied", [False, True])
def test_shrinking_removes_the_last_rows(tied: bool) -> None:
    model, ids = make_model(tied), torch.arange(8)[None]
    old_logits = model(ids)
    shrink_vocabulary(model, 47)
    assert model.config.vocab_size == 47
    torch.testing.assert_close(model(ids), old_logits[..., :47])
    assert model.token_embeddings.weight.shape == (47, 16) and model.token_embeddings.weight.requires_grad
    assert (model.lm_head is None) is tied
    shrink_vocabulary(model, 47)
    assert model(ids).shape == (1, 8, 47)
    with pytest.raises(UserError, match="has 47 token ids, its tokenizer 48; they do not belong together"):
        shrink_vocabulary(model, 48)
