"""Log-probabilities and entropy against plain float64 forms, masked means and sums against loops."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lm.common.errors import UserError
from lm.posttrain import (
    compute_entropy,
    get_response_log_probs,
    masked_mean,
    masked_normalize,
    tokenize_prompt_and_output,
)
from tests.helpers.policies import BYTES, LogitsOutput, make_policy
from tests.helpers.tensors import FEW_EXAMPLES, random_normal, seeds


@FEW_EXAMPLES
@given(seeds, st.sampled_from([0.01, 1.0, 30.0, 1e4]))
def test_entropy_equals_the_sum_over_probabilities(seed: int, scale: float) -> None:
    logits = random_normal(2, 5, seed=seed, scale=scale)
    exact = []
    for row in logits.double():
        probabilities = [math.exp(x - float(row.max())) for x in row.tolist()]
        total = sum(probabilities)
        exact.append(-sum(p / total * math.log(p / total) for p in probabilities if p))
    torch.testing.assert_close(compute_entropy(logits), torch.tensor(exact), atol=1e-5, rtol=1e-5)


def test_entropy_of_certain_and_impossible_tokens() -> None:
    logits = torch.tensor([[0.0, 0.0, -math.inf, -math.inf], [1e4, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(compute_entropy(logits), torch.tensor([math.log(2), 0.0, math.log(4)]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_log_probs_of_the_labels(dtype: torch.dtype) -> None:
    model = make_policy(dtype=dtype)
    batch = tokenize_prompt_and_output(["ab", "c"], ["d", "efg"], BYTES)
    ids, labels = batch["input_ids"], batch["labels"]
    logits = model(ids).detach().double()
    result = get_response_log_probs(LogitsOutput(model), ids, labels, return_token_entropy=True)
    assert result["log_probs"].dtype == result["token_entropy"].dtype
    assert result["log_probs"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for row, column in torch.cartesian_prod(torch.arange(2), torch.arange(3)).tolist():
        probabilities = torch.softmax(logits[row, column], 0)
        expected = math.log(probabilities[labels[row, column]])
        assert result["log_probs"][row, column].item() == pytest.approx(expected, abs=1e-5)
        entropy = -sum(p * math.log(p) for p in probabilities.tolist())
        assert result["token_entropy"][row, column].item() == pytest.approx(entropy, abs=1e-5)
    only = get_response_log_probs(model, ids, labels, return_token_entropy=False)
    assert list(only) == ["log_probs"] and torch.equal(only["log_probs"], result["log_probs"])
    assert only["log_probs"].requires_grad and not result["token_entropy"].requires_grad


def test_padding_on_the_right_changes_nothing_before_it() -> None:
    model = make_policy(dtype=torch.float64)
    short = tokenize_prompt_and_output(["ab"], ["cd"], BYTES)
    padded = tokenize_prompt_and_output(["ab", "x"], ["cd", "y" * 40], BYTES)
    for batch in (short, padded):
        batch |= get_response_log_probs(model, batch["input_ids"], batch["labels"], return_token_entropy=True)
    for name in ("log_probs", "token_entropy"):
        torch.testing.assert_close(padded[name][0, :3], short[name][0])


def test_a_prompt_longer_than_the_context_is_refused() -> None:
    batch = tokenize_prompt_and_output(["a" * 300], ["b"], BYTES)
    with pytest.raises(UserError, match="does not fit the model's context of 256"):
        get_response_log_probs(make_policy(), batch["input_ids"], batch["labels"], return_token_entropy=False)


@FEW_EXAMPLES
@given(seeds, st.sampled_from([None, 0, 1, -1]), st.sampled_from([torch.bool, torch.int64, torch.float32]))
def test_equal_to_loops_over_the_unmasked_elements(seed: int, dim: int | None, dtype: torch.dtype) -> None:
    tensor = random_normal(3, 4, seed=seed).double()
    mask = torch.rand(3, 4, generator=torch.Generator().manual_seed(seed)) < 0.5
    rows = {None: [(tensor.flatten(), mask.flatten())], 0: list(zip(tensor.T, mask.T, strict=True))}.get(
        dim, list(zip(tensor, mask, strict=True))
    )
    sums = [sum(float(x) for x, keep in zip(*row, strict=True) if keep) for row in rows]
    counts = [int(row_mask.sum()) for _, row_mask in rows]
    means = [total / count if count else math.nan for total, count in zip(sums, counts, strict=True)]
    shape = () if dim is None else (len(rows),)
    torch.testing.assert_close(
        masked_mean(tensor, mask.to(dtype), dim), torch.tensor(means).double().reshape(shape), equal_nan=True
    )
    expected = torch.tensor(sums).double().reshape(shape) / 7
    torch.testing.assert_close(masked_normalize(tensor, mask.to(dtype), dim, 7.0), expected)


def test_values_and_gradients_of_masked_elements_do_not_count() -> None:
    tensor = torch.tensor([[1.0, math.nan, 3.0], [math.inf, 5.0, -math.inf]], requires_grad=True)
    mask = torch.tensor([[1, 0, 1], [0, 1, 0]])
    assert masked_mean(tensor, mask, -1).tolist() == [2.0, 5.0]
    masked_normalize(tensor, mask).backward()
    assert tensor.grad is not None and torch.equal(tensor.grad, mask.float())


def test_no_element() -> None:
    tensor, mask = torch.ones(2, 3), torch.zeros(2, 3)
    assert masked_mean(tensor, mask, 1).isnan().all()
    assert masked_normalize(tensor, mask, 1).tolist() == [0.0, 0.0]


def test_the_side_of_the_padding_does_not_matter() -> None:
    right, left = torch.tensor([[1.0, 2.0, 9.0]]), torch.tensor([[9.0, 1.0, 2.0]])
    masks = torch.tensor([[1, 1, 0]]), torch.tensor([[0, 1, 1]])
    assert masked_mean(right, masks[0]) == masked_mean(left, masks[1]) == pytest.approx(1.5)
