"""DPO against hand-worked values, a float64 reference and TRL's trainer."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lm.common.errors import UserError
from lm.posttrain import (
    compute_dpo_loss,
    compute_per_instance_dpo_loss,
    compute_sequence_log_probs,
    get_response_log_probs,
)
from lm.posttrain.tokenization import ALPACA_PROMPT, encode_document
from tests.helpers.llamas import UNGROUPED, make_transformers_llama
from tests.helpers.policies import BYTES, LogitsOutput, make_policy
from tests.helpers.tensors import FEW_EXAMPLES, random_normal, seeds


def reference_loss(log_probs: list[float], beta: float, smoothing: float) -> float:
    policy_chosen, policy_rejected, reference_chosen, reference_rejected = log_probs
    margin = beta * ((policy_chosen - policy_rejected) - (reference_chosen - reference_rejected))
    return (1 - smoothing) * math.log1p(math.exp(-margin)) + smoothing * math.log1p(math.exp(margin))


@FEW_EXAMPLES
@given(seeds, st.sampled_from([0.1, 0.5, 2.0]), st.sampled_from([0.0, 0.1, 0.4]))
def test_loss_equals_the_reference(seed: int, beta: float, smoothing: float) -> None:
    log_probs = random_normal(4, 3, seed=seed, scale=2.0).double()
    chosen, rejected, reference_chosen, reference_rejected = log_probs
    loss, metadata = compute_dpo_loss(chosen, rejected, reference_chosen, reference_rejected, beta, smoothing)
    expected = [reference_loss(column.tolist(), beta, smoothing) for column in log_probs.T]
    torch.testing.assert_close(loss, torch.tensor(expected).double())
    margin = metadata["chosen_reward"] - metadata["rejected_reward"]
    torch.testing.assert_close(metadata["margin"], margin)
    assert metadata["accuracy"].tolist() == (margin > 0).double().tolist()


def test_equal_models_have_the_loss_log_2_and_push_both_answers() -> None:
    policy = torch.zeros(2, 1, requires_grad=True)
    loss, _ = compute_dpo_loss(policy[0], policy[1], torch.zeros(1), torch.zeros(1), beta=0.5)
    loss.sum().backward()
    assert loss.item() == pytest.approx(math.log(2))
    assert policy.grad is not None and policy.grad.tolist() == [[-0.25], [0.25]]


@pytest.mark.parametrize(("beta", "smoothing"), [(0.0, 0.0), (-1.0, 0.0), (0.1, 0.5), (0.1, -0.1), (math.nan, 0.0)])
def test_invalid_options_are_refused(beta: float, smoothing: float) -> None:
    zero = torch.zeros(1)
    with pytest.raises(UserError, match="beta must be above 0"):
        compute_dpo_loss(zero, zero, zero, zero, beta, smoothing)


def test_sequence_log_probs() -> None:
    log_probs = torch.tensor([[-1.0, -2.0, -4.0], [-8.0, -16.0, -32.0], [-1.0, -1.0, -1.0]])
    mask = torch.tensor([[0, 1, 1], [1, 0, 0], [0, 0, 0]])
    assert compute_sequence_log_probs(log_probs, mask).tolist() == [-6.0, -8.0, 0.0]
    assert compute_sequence_log_probs(log_probs, mask, is_length_normalized=True).tolist() == [-3.0, -8.0, 0.0]


@pytest.mark.parametrize(
    ("chosen", "rejected"), [("yes", "no"), ("a", ""), ("the same start", "the same end"), ("equal", "equal")]
)
def test_loss_of_one_pair_equals_that_of_whole_documents(chosen: str, rejected: str) -> None:
    policy, reference = make_policy(0, dtype=torch.float64), make_policy(1, dtype=torch.float64)
    prompt = "Is {this} right?"
    loss = compute_per_instance_dpo_loss(LogitsOutput(policy), reference, BYTES, 0.5, prompt, chosen, rejected)
    log_probs = []
    for model in (policy, reference):
        for answer in (chosen, rejected):
            ids = torch.tensor([encode_document(BYTES, ALPACA_PROMPT.format(instruction=prompt) + answer)])
            logits = torch.log_softmax(model(ids[:, :-1]), -1)[0]
            log_probs.append(sum(logits[t, token_id].item() for t, token_id in enumerate(ids[0, 1:].tolist())))
    assert loss.item() == pytest.approx(reference_loss(log_probs, 0.5, 0.0), abs=1e-9)
    loss.backward()
    assert all(p.grad is not None for p in policy.parameters())
    assert all(p.grad is None for p in reference.parameters())


def trl_batch(directory: Path, loss_type: str, batch_size: int) -> tuple[Any, dict[str, Tensor]]:
    """Return TRL's trainer for two tiny Llamas, and its first batch: the chosen rows, then the rejected ones."""
    trl = pytest.importorskip("trl", reason="the reference")
    transformers, datasets = pytest.importorskip("transformers"), pytest.importorskip("datasets")
    tokenizers = pytest.importorskip("tokenizers")
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "to", "my", "red", "house", "<pad>", "<end>"]
    model = tokenizers.models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="the")
    word_tokenizer = tokenizers.Tokenizer(model)
    word_tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=word_tokenizer, pad_token="<pad>", eos_token="<end>"
    )
    rows = {
        "prompt": ["the cat", "my red house and a", "dog"],
        "chosen": [" sat on a mat", " cat", " ran to my red house"],
        "rejected": [" ran", " mat and dog ran", " sat on the red cat and a mat"],
    }
    policy, reference = make_transformers_llama(UNGROUPED), make_transformers_llama(UNGROUPED)
    with torch.no_grad():
        for index, parameter in enumerate(policy.parameters()):
            parameter += 0.02 * random_normal(*parameter.shape, seed=index)
    config = trl.DPOConfig(
        str(directory),
        loss_type=[loss_type],
        beta=0.3,
        label_smoothing=0.2 if loss_type == "aot" else 0.0,
        per_device_train_batch_size=batch_size,
        report_to=[],
        bf16=False,
        use_cpu=True,
    )
    trainer = trl.DPOTrainer(
        policy, reference, config, train_dataset=datasets.Dataset.from_dict(rows), processing_class=tokenizer
    )
    return trainer, next(iter(trainer.get_train_dataloader()))


@pytest.mark.parametrize(
    ("loss_type", "batch_size"),
    [("sigmoid", 3), ("sigmoid_norm", 3), ("aot", 1)],  # of one pair, AOT is the loss with label smoothing
)
def test_loss_and_gradient_equal_those_of_trl(tmp_path: Path, loss_type: str, batch_size: int) -> None:
    trainer, batch = trl_batch(tmp_path, loss_type, batch_size)
    model = trainer.model
    trainer.compute_loss(model, batch).backward()
    theirs = [parameter.grad.clone() for parameter in model.parameters()]
    loss_of_trl = trainer.compute_loss(model, batch).item()
    model.zero_grad()

    ids, mask = batch["input_ids"], batch["completion_mask"][:, 1:]
    log_probs: list[Tensor] = []
    for scored in (model, trainer.ref_model):
        per_token = get_response_log_probs(scored, ids[:, :-1], ids[:, 1:], return_token_entropy=False)["log_probs"]
        log_probs += compute_sequence_log_probs(per_token, mask, loss_type == "sigmoid_norm").chunk(2)
    policy_chosen, policy_rejected, reference_chosen, reference_rejected = log_probs
    losses, _ = compute_dpo_loss(
        *(policy_chosen, policy_rejected, reference_chosen.detach(), reference_rejected.detach()),
        beta=0.3,
        label_smoothing=0.2 if loss_type == "aot" else 0.0,
    )
    losses.mean().backward()
    assert losses.mean().item() == pytest.approx(loss_of_trl, abs=1e-5)
    for parameter, gradient in zip(model.parameters(), theirs, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-5, rtol=0)
