"""Log-probabilities and entropy against plain float64 forms."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lm.common.errors import UserError
from lm.posttrain import compute_entropy, get_response_log_probs, tokenize_prompt_and_output
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
