"""The supervised step against a loop, and its independence of the split into micro-batches."""

import pytest
import torch

from lm.posttrain import get_response_log_probs, sft_microbatch_train_step, tokenize_prompt_and_output
from tests.helpers.policies import BYTES, make_policy
from tests.helpers.tensors import random_normal


@pytest.mark.parametrize(("constant", "steps"), [(1.0, 1), (1.0, 2), (42.0, 4)])
def test_loss_and_gradient_of_hand_worked_rows(constant: float, steps: int) -> None:
    log_probs = random_normal(3, 4).double().requires_grad_()
    mask = torch.tensor([[0, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])  # two tokens, a one-token answer, all masked
    loss, metadata = sft_microbatch_train_step(log_probs, mask, steps, constant)
    values = log_probs.detach()
    expected = -(values[0, 1] + values[0, 2] + values[1, 0]) / (3 * constant * steps)
    torch.testing.assert_close(loss, expected)
    assert not loss.requires_grad
    torch.testing.assert_close(log_probs.grad, -mask.double() / (3 * constant * steps))
    assert metadata["response_tokens"] == 3


def test_micro_batches_add_up_to_the_whole_batch() -> None:
    batch = tokenize_prompt_and_output(["a", "bc", "", "d"], ["xyz", "y", "zz", ""], BYTES)
    gradients = []
    for parts in (1, 2, 4):
        model = make_policy(dtype=torch.float64)
        losses = []
        for ids, labels, mask in zip(*(tensor.chunk(parts) for tensor in batch.values()), strict=True):
            log_probs = get_response_log_probs(model, ids, labels, return_token_entropy=False)["log_probs"]
            losses.append(sft_microbatch_train_step(log_probs, mask, parts, 3.0)[0])
        gradients.append((sum(losses), [p.grad for p in model.parameters()]))
    for loss, parts_gradients in gradients[1:]:
        torch.testing.assert_close(loss, gradients[0][0])
        torch.testing.assert_close(parts_gradients, gradients[0][1])
