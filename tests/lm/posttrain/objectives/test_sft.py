"""The objective of supervised fine-tuning against a plain sum over dialogs."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from lm.common.errors import UserError
from lm.common.execution import Execution
from lm.data.chat_template import encode_dialog
from lm.data.dialogs import Dialog
from lm.distributed.plan import parallelize
from lm.model.transformer import TransformerLM
from lm.posttrain import get_response_log_probs, sft_microbatch_train_step
from lm.posttrain.job import ObjectiveInputs
from lm.posttrain.objectives.sft import SupervisedFineTuning
from tests.helpers.posttraining import CHAT, DIALOGS, chat_policy, dialog, quick_config


def make_objective(model: TransformerLM, dialogs: Sequence[Dialog] = DIALOGS, **settings: int) -> SupervisedFineTuning:
    return SupervisedFineTuning(quick_config(**settings), ObjectiveInputs(model, CHAT, dialogs, DIALOGS[:3]))


def plain_losses(model: TransformerLM, example: Dialog) -> Tensor:
    """Return the cross-entropy of each token of the answers, from the dialog alone."""
    encoded = encode_dialog(CHAT, example.messages)
    ids = torch.tensor([encoded.ids])
    log_probs = model(ids[:, :-1]).double().log_softmax(-1)[0]
    losses = -log_probs.gather(-1, ids[0, 1:, None]).squeeze(-1)
    return losses[torch.tensor(encoded.is_target[1:])]


def test_packed_rows_have_the_losses_and_gradients_of_single_dialogs() -> None:
    model = chat_policy()
    objective = make_objective(model, batch_size=1)
    assert len(objective.train.input_ids) == 1, "all dialogs share a row"
    (batch,) = objective.micro_batches(0)
    objective.loss_sum(model, batch).backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    expected = torch.cat([plain_losses(model, example) for example in DIALOGS])
    assert objective.weight(batch) == len(expected)
    torch.testing.assert_close(objective.loss_sum(model, batch).double(), expected.sum(), rtol=1e-5, atol=1e-5)
    expected.sum().backward()
    plain = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    for gradient, other in zip(gradients, plain, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-4)


def test_checkpointing_of_activations_does_not_change_the_loss() -> None:
    model = chat_policy()
    objective = make_objective(model, batch_size=1)
    (batch,) = objective.micro_batches(0)
    before = objective.loss_sum(model, batch)
    parallelize(model, Execution(activation_checkpointing=True), "none")
    after = objective.loss_sum(model, batch)
    assert before == after
    after.backward()


def test_an_epoch_has_all_rows_in_any_division() -> None:
    model = chat_policy()
    long = [dialog(f"say {letter}", letter * 150) for letter in "abcdefgh"]
    whole = make_objective(model, long, batch_size=4)
    parts = make_objective(model, long, batch_size=4, gradient_accumulation_steps=2)
    assert len(whole.train.input_ids) == 8
    epoch = torch.cat([batch[0] for step in (0, 1) for batch in whole.micro_batches(step)])
    assert {tuple(row) for row in epoch.tolist()} == {tuple(row) for row in whole.train.input_ids.tolist()}
    split = parts.micro_batches(0)
    assert len(split) == 2
    assert torch.equal(torch.cat([batch[0] for batch in split]), whole.micro_batches(0)[0][0])


def test_the_evaluation_is_the_mean_over_the_tokens_of_held_out_answers() -> None:
    model = chat_policy()
    expected = torch.cat([plain_losses(model, example) for example in DIALOGS[:3]]).mean().item()
    with torch.no_grad():
        metrics = make_objective(model).evaluate(model, is_final=True)
    assert metrics == {"valid_loss": pytest.approx(expected, rel=1e-5)}


def test_dialogs_without_room_for_an_answer_are_refused() -> None:
    with pytest.raises(UserError, match="No dialog has an answer within the model's context of 256"):
        make_objective(chat_policy(), [dialog("x" * 300, "y")])


def test_the_gradient_is_that_of_the_step_on_log_probabilities() -> None:
    model = chat_policy()
    objective = make_objective(model, batch_size=1)
    (batch,) = objective.micro_batches(0)
    objective.loss_sum(model, batch).backward()
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    for example in DIALOGS:
        encoded = encode_dialog(CHAT, example.messages)
        ids, mask = torch.tensor([encoded.ids]), torch.tensor([encoded.is_target])
        scores = get_response_log_probs(model, ids[:, :-1], ids[:, 1:], return_token_entropy=False)
        sft_microbatch_train_step(scores["log_probs"], mask[:, 1:], gradient_accumulation_steps=1)
    actual = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    for gradient, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-5)
