"""The objective of DPO against plain sums over single answers."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lm.common.errors import UserError
from lm.data.chat_template import encode_dialog
from lm.data.dialogs import PreferencePair
from lm.model.transformer import TransformerLM
from lm.posttrain.config import DPOConfig
from lm.posttrain.job import ObjectiveInputs
from lm.posttrain.objectives.dpo import DPO
from lm.train.tracking import read_metrics
from tests.helpers.posttraining import CHAT, PAIRS, chat_policy, dialog, pair, quick_config


def make_objective(model: TransformerLM, out: Path, pairs: list[PreferencePair] = PAIRS, steps: int = 6) -> DPO:
    config = DPOConfig(train=quick_config(gradient_accumulation_steps=2, steps=steps), beta=0.5)
    return DPO(config, ObjectiveInputs(model, CHAT, pairs, PAIRS[:3], out=out))


def plain_log_prob(model: TransformerLM, prompt: str, answer: str) -> Tensor:
    encoded = encode_dialog(CHAT, dialog(prompt, answer).messages)
    ids = torch.tensor([encoded.ids])
    log_probs = model(ids[:, :-1]).double().log_softmax(-1)[0].gather(-1, ids[0, 1:, None]).squeeze(-1)
    return log_probs[torch.tensor(encoded.is_target[1:])].sum()


def plain_loss(model: TransformerLM, reference: TransformerLM, example: PreferencePair, beta: float) -> Tensor:
    prompt = example.prompt[0]["content"]
    ratios = [
        plain_log_prob(model, prompt, answer) - plain_log_prob(reference, prompt, answer).detach()
        for answer in (example.chosen, example.rejected)
    ]
    return -F.logsigmoid(beta * (ratios[0] - ratios[1]))


def test_the_loss_of_a_step_is_that_of_its_pairs(tmp_path: Path) -> None:
    model, reference = chat_policy(), chat_policy()
    objective = make_objective(model, tmp_path)
    first = objective.micro_batches(0)
    assert sum(objective.loss_sum(model, batch).item() for batch in first) == pytest.approx(4 * 0.693147, rel=1e-4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    seen: set[int] = set()
    for step in (0, 1):
        batches = objective.micro_batches(step)
        assert [int(objective.weight(batch)) for batch in batches] == [2, 2]
        used = [index for batch in batches for index in batch.indices]
        expected = sum(plain_loss(model, reference, PAIRS[index], 0.5) for index in used)
        actual = sum(objective.loss_sum(model, batch) for batch in batches)
        torch.testing.assert_close(actual, torch.as_tensor(expected).float(), rtol=1e-4, atol=1e-4)
        seen |= set(used)
    assert seen == set(range(8)), "an epoch has all pairs"
    assert objective.step_metrics().keys() == {"accuracy", "margin", "chosen_reward", "rejected_reward"}


def test_held_out_pairs_are_evaluated(tmp_path: Path) -> None:
    model, reference = chat_policy(), chat_policy()
    objective = make_objective(model, tmp_path)
    objective.micro_batches(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
        losses = [float(plain_loss(model, reference, example, 0.5)) for example in PAIRS[:3]]
        metrics = objective.evaluate(model, is_final=True)
    assert metrics["valid_loss"] == pytest.approx(sum(losses) / 3, rel=1e-4)
    assert metrics["valid_accuracy"] == pytest.approx(sum(loss < 0.693147 for loss in losses) / 3)


def test_a_resumed_training_keeps_the_first_reference(tmp_path: Path) -> None:
    objective = make_objective(chat_policy(), tmp_path)
    objective.micro_batches(0)
    (tmp_path / "step-0000002").mkdir()
    resumed = make_objective(chat_policy(seed=1), tmp_path)  # other weights: they must not be used
    resumed.restore(tmp_path, 2)
    assert resumed._reference == objective._reference
    (tmp_path / "reference.jsonl").write_text('{"step": 0}\n')
    again = make_objective(chat_policy(), tmp_path)
    again.restore(tmp_path, 2)
    assert again._reference == objective._reference, "a damaged file is computed again"


def stored_reference(out: Path) -> dict[int, tuple[float, float]]:
    rows = read_metrics(out / "reference.jsonl")
    assert all(row["step"] == 0 for row in rows)
    return {row["pair"]: (row["chosen"], row["rejected"]) for row in rows}


def test_the_reference_is_written_for_the_record(tmp_path: Path) -> None:
    make_objective(chat_policy(), tmp_path).micro_batches(0)
    stored = stored_reference(tmp_path)
    assert stored.keys() == set(range(len(PAIRS) + 3))
    assert all(chosen < 0 and rejected < 0 for chosen, rejected in stored.values())


def test_the_reference_has_the_pairs_that_are_used(tmp_path: Path) -> None:
    model, pairs = chat_policy(), [pair(f"say {number}", "yes", "no!") for number in range(40)]
    short = make_objective(model, tmp_path, pairs, steps=2)
    used = {index for step in (0, 1) for batch in short.micro_batches(step) for index in batch.indices}
    first = stored_reference(tmp_path)
    assert first.keys() == used | {40, 41, 42}, "those of two steps, and all held-out ones"
    with torch.no_grad():
        short.evaluate(model, is_final=True)
    longer = make_objective(model, tmp_path, pairs, steps=3)
    longer.restore(tmp_path, 2)
    batches = longer.micro_batches(2)
    stored = stored_reference(tmp_path)
    assert stored.keys() == first.keys() | {index for batch in batches for index in batch.indices}
    assert len(stored) == 15 and first.items() <= stored.items()
    assert sum(longer.loss_sum(model, batch).item() for batch in batches) == pytest.approx(4 * 0.693147, rel=1e-4)


def test_the_ranks_divide_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objective = make_objective(chat_policy(), tmp_path)
    objective.micro_batches(0)
    ranks = [make_objective(chat_policy(), tmp_path) for _ in range(2)]
    parts: list[dict[int, list[float]]] = []
    barrier = threading.Barrier(2)

    def all_gather(value: dict[int, list[float]]) -> list[dict[int, list[float]]]:
        parts.append(value)
        barrier.wait(60)
        return parts

    monkeypatch.setattr("lm.posttrain.objectives.dpo.all_gather", all_gather)
    for number, rank in enumerate(ranks):
        rank.rank, rank.world_size = number, 2
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda rank: rank.micro_batches(0), ranks))
    assert sorted(map(len, parts)) == [5, 6]
    for rank in ranks:
        assert list(rank._reference) == list(objective._reference)
        assert [*rank._reference.values()] == [pytest.approx(row) for row in objective._reference.values()]


def test_pairs_that_do_not_fit_are_left_out(tmp_path: Path) -> None:
    long = pair("x" * 300, "y", "z")
    assert make_objective(chat_policy(), tmp_path, [*PAIRS, long]).left_out == 1
    with pytest.raises(UserError, match="No pair of answers is within the model's context of 256"):
        make_objective(chat_policy(), tmp_path, [long])
