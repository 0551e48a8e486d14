"""The objective of distillation: gradients, answers of the data, metrics, adapters as teachers, and what is refused."""

import re
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lm.checkpoint.training_checkpoint import load_model, save_training
from lm.common.errors import UserError
from lm.common.execution import Execution
from lm.data.chat_template import encode_answer
from lm.data.dialogs import Message
from lm.eval.problems import Problem
from lm.eval.reward_worker import RewardWorker
from lm.model.config import AdapterConfig
from lm.model.transformer import TransformerLM
from lm.posttrain.config import DistillConfig
from lm.posttrain.job import ObjectiveInputs, PosttrainJob
from lm.posttrain.losses.distillation import compute_divergence
from lm.posttrain.objectives.distillation import Distillation
from lm.train.frozen_base import FrozenBase, load_beside
from lm.train.tracking import read_metrics
from lm.train.trainer import Trainer
from tests.helpers.posttraining import (
    CHAT,
    DIALOGS,
    PROBLEMS,
    UNEVEN_PROBLEMS,
    LetterReward,
    chat_policy,
    quick_config,
    write_posttrain_job,
)
from tests.helpers.training import train_here

SOLVED = [replace(problem, solution=f"the {problem.ground_truth[0]}") for problem in PROBLEMS]


def make_objective(
    model: TransformerLM,
    out: Path,
    teacher: TransformerLM | None = None,
    examples: Any = PROBLEMS,
    reward: RewardWorker | None = None,
    **settings: Any,
) -> Distillation:
    options: dict[str, Any] = {"train": quick_config(batch_size=8, gradient_accumulation_steps=2), "max_new_tokens": 6}
    inputs = ObjectiveInputs(model, CHAT, examples, examples[:3], out=out)
    return Distillation(DistillConfig(**options | settings), inputs, teacher or chat_policy(seed=1).eval(), reward)


def gradients(model: TransformerLM, objective: Distillation) -> list[Tensor | None]:
    """Return the gradients that the trainer would compute for the first step."""
    model.zero_grad()
    batches = objective.micro_batches(0)
    divisor = sum(objective.weight(batch) for batch in batches)
    for batch in batches:
        (objective.loss_sum(model, batch) / divisor).backward()
    return [parameter.grad for parameter in model.parameters()]


def plain_loss(model: TransformerLM, objective: Distillation) -> Tensor:
    """Return the mean over all tokens of the divergences, response by response."""
    divergences = []
    for row in objective._responses:
        ids = torch.tensor([row.prompt_ids + row.ids])
        logits, teacher_logits = (
            scorer(ids[:, :-1])[0, len(row.prompt_ids) - 1 :] for scorer in (model, objective.teacher)
        )
        config = objective.config
        divergences.append(compute_divergence(logits, teacher_logits.detach(), config.beta, config.temperature))
    return torch.cat(divergences).mean()


@pytest.mark.parametrize("settings", [{}, {"beta": 0.3, "temperature": 2.0}, {"beta": 0.0, "on_policy_fraction": 0.5}])
def test_a_step_has_the_gradient_of_the_plain_loss(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = chat_policy()
    objective = make_objective(model, tmp_path, examples=[*SOLVED, *UNEVEN_PROBLEMS], **settings)
    actual = gradients(model, objective)
    model.zero_grad()
    loss = plain_loss(model, objective)
    loss.backward()
    assert objective.step_metrics()["divergence"] == pytest.approx(loss.item(), rel=1e-4)
    for gradient, parameter in zip(actual, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-3, atol=1e-6)
    assert all(parameter.grad is None for parameter in objective.teacher.parameters())


def test_a_model_that_is_its_teacher_has_nothing_to_learn(tmp_path: Path) -> None:
    model = chat_policy()
    objective = make_objective(model, tmp_path, chat_policy(), beta=1.0)
    assert all(gradient is not None and gradient.abs().max() < 1e-6 for gradient in gradients(model, objective))
    assert objective.step_metrics()["divergence"] == pytest.approx(0, abs=1e-6)
    with torch.no_grad():
        assert objective.evaluate(model, True)["valid_divergence"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(("examples", "answers"), [(SOLVED, [p.solution for p in SOLVED]), (DIALOGS, list("abcdefgh"))])
def test_answers_of_the_data_replace_a_share_of_the_responses(
    tmp_path: Path, examples: list[Any], answers: list[str]
) -> None:
    """They are cut like responses, have the token that ends an answer, and do not count in metrics of the model."""
    train = quick_config(batch_size=64)
    model = chat_policy()
    for fraction, low, high in ((0.0, 64, 64), (0.5, 20, 44), (1.0, 0, 0)):
        objective = make_objective(
            model, tmp_path, examples=examples, train=train, on_policy_fraction=fraction, max_new_tokens=4
        )
        objective.micro_batches(0)
        rows = objective._responses
        given = [row for row in rows if not row.log_probs]
        assert low <= len(given) <= high
        for row in given:
            example = examples[row.problem]
            question = example.prompt if isinstance(example, Problem) else example.prompt[0]["content"]
            answer = row.text
            dialog = [Message(role="user", content=question), Message(role="assistant", content=answer)]
            assert answers[row.problem] == answer[: len(answers[row.problem])]
            assert (row.prompt_ids, row.ids) == (encode_answer(CHAT, dialog)[0], encode_answer(CHAT, dialog)[1][:4])
        sampled = [row for row in rows if row.log_probs]
        assert all(len(row.ids) == len(row.log_probs) for row in sampled)
        figures = objective._rollout_metrics
        assert ("entropy" in figures) == ("response_tokens" in figures) == bool(sampled)
        if sampled:
            mean = sum(len(row.ids) for row in sampled) / len(sampled)
            assert figures["response_tokens"] == pytest.approx(mean)


def test_problems_without_a_solution_are_answered_by_the_model(tmp_path: Path) -> None:
    objective = make_objective(chat_policy(), tmp_path, on_policy_fraction=0.0)
    objective.micro_batches(0)
    assert all(row.log_probs for row in objective._responses)


def test_evaluation_is_the_mean_over_greedy_responses(tmp_path: Path) -> None:
    model = chat_policy()
    objective = make_objective(model, tmp_path, reward=LetterReward())
    with torch.no_grad():
        figures = objective.evaluate(model, is_final=True)
    assert [*figures] == ["valid_divergence", "valid_reward", "valid_tokens"]
    expected = []
    for prompt in objective.valid_prompts:
        ids = torch.tensor([prompt])
        for _ in range(6):
            ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], -1)
            if int(ids[0, -1]) in CHAT.stop_ids:
                break
        place = slice(len(prompt) - 1, -1)
        expected.append(compute_divergence(model(ids)[0, place], objective.teacher(ids)[0, place], 1.0).mean())
    assert figures["valid_divergence"] == pytest.approx(torch.stack(expected).mean().item(), rel=1e-4)


def test_the_model_comes_near_its_teacher(tmp_path: Path) -> None:
    model, teacher = chat_policy(), chat_policy(seed=1).eval()
    config = quick_config(steps=40, batch_size=16, max_lr=0.03, eval_interval=40, sample_tokens=0)
    objective = make_objective(model, tmp_path, teacher, train=config)
    Trainer(config, model, objective, Execution(device="cpu", compile=False, log_interval=1), tmp_path).run()
    divergences = [row["divergence"] for row in read_metrics(tmp_path / "metrics.jsonl")]
    assert divergences[-1] < 0.5 * divergences[0]


def test_a_teacher_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    config = chat_policy().config
    with pytest.raises(UserError, match=r"teacher has 90 token ids, the tokenizer 26\d\. .* distill\.teacher"):
        make_objective(chat_policy(), tmp_path, TransformerLM(replace(config, vocab_size=90)))
    needed = len(make_objective(chat_policy(), tmp_path).prompts[0]) + 6 - 1
    short, long = (TransformerLM(replace(config, context_length=length)) for length in (needed - 1, needed))
    message = f"context of {needed - 1} tokens, but prompts with responses take {needed}. Lower distill.max_new_tokens"
    with pytest.raises(UserError, match=re.escape(message)):
        make_objective(chat_policy(), tmp_path, short)
    make_objective(chat_policy(), tmp_path, long).micro_batches(0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "nf4"])
def test_an_adapter_over_the_same_base_is_a_teacher_without_a_copy(tmp_path: Path, dtype: Any) -> None:
    adapter = AdapterConfig(rank=2, alpha=8, dtype=dtype)
    teachers = {}
    for name, targets in (("all", []), ("some", ["q_proj", "w2"])):
        job = write_posttrain_job(tmp_path / name, "sft", adapter=replace(adapter, targets=targets))
        train_here(PosttrainJob.read(job))
        teachers[name] = job.parent / "step-0000006"
    base = tmp_path / "all" / "model"
    model = load_model(base).train()
    frozen = FrozenBase.adapt(model, base, replace(adapter, targets=["w1", "w3"]), 1e-3)
    ids = torch.arange(40).view(2, 20)
    expected = model(ids)
    own = {parameter.data_ptr() for parameter in (*model.parameters(), *model.buffers())}
    for name, checkpoint in teachers.items():
        teacher = load_beside(checkpoint, model, frozen)
        layers = [value for key, value in teacher.named_parameters() if "lora_" in key]
        assert len(layers) == 2 * 2 * (7 if name == "all" else 2)
        tensors = {parameter.data_ptr() for parameter in (*teacher.parameters(), *teacher.buffers())}
        assert tensors - own == {layer.data_ptr() for layer in layers}, "only the adapter is new"
        tolerance = 0.1 if dtype == "bfloat16" else 1e-4
        torch.testing.assert_close(teacher(ids).float(), load_model(checkpoint)(ids), atol=tolerance, rtol=1e-4)
    assert torch.equal(model(ids), expected), "the model itself has not changed"


def test_a_job_shares_the_base_of_its_adapter_with_that_of_its_teacher(tmp_path: Path) -> None:
    adapter = AdapterConfig(rank=2, alpha=8)
    teacher_path = write_posttrain_job(tmp_path / "teacher", "sft", adapter=adapter)
    train_here(PosttrainJob.read(teacher_path))
    path = write_posttrain_job(tmp_path / "student", "distill", {"max_new_tokens": 4}, adapter)
    job = PosttrainJob.read(path)
    job.teacher = str(teacher_path.parent / "step-0000006")
    with ExitStack() as job.contexts:
        trainer = job.make_trainer(tmp_path / "out", torch.device("cpu"))
        objective = trainer.objective
        assert isinstance(objective, Distillation)
        assert objective.teacher.head_weight is trainer.model.head_weight
        assert not torch.equal(objective.teacher(torch.tensor([[1, 2]])), trainer.model(torch.tensor([[1, 2]])))
    job.teacher = ""
    with pytest.raises(UserError, match="The job of distill names no teacher"):
        job.make_trainer(tmp_path / "out", torch.device("cpu"))


def test_a_teacher_may_have_more_ids_than_the_model(tmp_path: Path) -> None:
    model = chat_policy()
    teacher = TransformerLM(replace(model.config, vocab_size=300)).eval()
    objective = make_objective(model, tmp_path, teacher)
    batch = objective.micro_batches(0)[0]
    loss = objective.loss_sum(model, batch)
    hidden = model.hidden_states(batch.input_ids)[batch.mask], teacher.hidden_states(batch.input_ids)[batch.mask]
    logits = model.logits(hidden[0]), teacher.logits(hidden[1])[:, : model.config.vocab_size]
    config = objective.config
    torch.testing.assert_close(loss, compute_divergence(*logits, config.beta, config.temperature).sum())


def test_a_teacher_with_another_rotary_base_is_loaded_whole(tmp_path: Path) -> None:
    adapter = AdapterConfig(rank=2)
    job = write_posttrain_job(tmp_path, "sft", adapter=adapter)
    train_here(PosttrainJob.read(job))
    base, checkpoint = tmp_path / "model", job.parent / "step-0000006"
    config = load_model(base).config
    model = load_model(base, config=replace(config, rope_theta=2 * config.rope_theta))
    frozen = FrozenBase.adapt(model, base, adapter, 1e-3)
    ids = torch.arange(40).view(2, 20)
    torch.testing.assert_close(load_beside(checkpoint, model, frozen)(ids), load_model(checkpoint)(ids))


def test_other_teachers_are_loaded_whole(tmp_path: Path) -> None:
    save_training(tmp_path / "base", chat_policy(), [], 0, {})
    job = write_posttrain_job(tmp_path / "other", "sft", adapter=AdapterConfig(rank=2))
    train_here(PosttrainJob.read(job))
    model = load_model(tmp_path / "base")
    checkpoint = job.parent / "step-0000006"
    for base in (None, FrozenBase.adapt(model, tmp_path / "base", AdapterConfig(rank=2, dtype="bfloat16"), 1e-3)):
        teacher = load_beside(checkpoint, model, base)
        assert teacher.state_dict().keys() == chat_policy().state_dict().keys()
        assert teacher.head_weight.data_ptr() != model.head_weight.data_ptr()
