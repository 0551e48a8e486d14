"""The experiments of post-training compute their figures right, with trainings too small to learn anything."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.posttrain import addition, distillation, words
from lm.eval.answers import parse_gsm8k_response
from lm.eval.problems import Problem
from lm.eval.rewards import gsm8k_reward
from lm.model.flops import flops_per_token
from lm.model.functional import cross_entropy
from lm.posttrain.objectives.generation import Rollout
from tests.helpers.posttraining import chat_policy


def test_solutions_add_column_by_column() -> None:
    assert addition.write_solution(347, 85, 0) == "#### 432"
    assert addition.write_solution(347, 85, 1) == "7+5=12 4+8+1=13 3+0+1=4 #### 432"
    assert addition.write_solution(99, 1, 2) == "9+1=10 9+1=10 9+0+1=10 9+0+1=10 #### 100"
    for problem in addition.make_problems(50, seed=1):
        assert problem.solution and gsm8k_reward(problem.solution, problem.ground_truth)["reward"] == 1
        assert parse_gsm8k_response(problem.ground_truth) == str(eval(problem.prompt.removesuffix("=")))


def rows_of(rewards: list[float], step: int = 1, length: int = 3) -> list[dict[str, Any]]:
    return [{"step": step, "ids": [0] * length, "rewards": {"reward": reward}} for reward in rewards]


def test_shares_of_the_advantages() -> None:
    hard, middle, easy, none = ([1.0] * count + [0.0] * (8 - count) for count in (1, 4, 7, 8))
    rows = rows_of(hard + middle + easy + none)
    # Without a division, the absolute advantages of k right responses of 8 add up to 2 k (8 - k) / 8.
    expected = {"hard": 14 / 60, "middle": 32 / 60, "easy": 14 / 60}
    assert addition.advantage_shares(rows, divides_by_std=False) == pytest.approx(expected)
    # The sample deviation is sqrt(k (8 - k) / 56).
    sizes = {
        kind: k * (8 - k) / 4 / math.sqrt(k * (8 - k) / 56) for kind, k in (("hard", 1), ("middle", 4), ("easy", 7))
    }
    expected = {kind: size / sum(sizes.values()) for kind, size in sizes.items()}
    assert addition.advantage_shares(rows, divides_by_std=True) == pytest.approx(expected, rel=1e-4)


def test_lengths_of_wrong_responses_at_the_start_and_the_end() -> None:
    rows = (
        rows_of([0.0, 1.0], step=1, length=4) + rows_of([0.0], 20, 6) + rows_of([0.0], 50, 99) + rows_of([0.0], 81, 9)
    )
    lengths = addition.wrong_lengths(rows, steps=100)
    assert lengths["wrong, first steps"] == 5 and lengths["right, first steps"] == 4
    assert lengths["wrong, last steps"] == 9 and math.isnan(lengths["right, last steps"])


def test_distinct_trigrams() -> None:
    assert words.distinct_trigrams(["a b c d", "a b c"]) == pytest.approx(2 / 3)
    assert words.distinct_trigrams(["a b"]) == 0


def test_bits_per_byte_of_responses() -> None:
    model = chat_policy()
    rollouts = [Rollout([1, 2], [3, 4, 5], [], "abcd"), Rollout([6], [7], [], "é")]
    nats = 0.0
    for row in rollouts:
        ids = torch.tensor(row.prompt_ids + row.ids)
        first = len(row.prompt_ids)
        nats += cross_entropy(model(ids[None, :-1])[0, first - 1 :], ids[first:]).item() * len(row.ids)
    assert words.bits_per_byte(model, rollouts) == pytest.approx(nats / math.log(2) / 6, rel=1e-5)


def test_figures_of_stories() -> None:
    problems = [Problem("a", ["cat", "dog"]), Problem("b", ["sun"])]
    rollouts = [Rollout([1], [2, 3], [], "A cat sat."), Rollout([1], [2], [], "The sun and the cat.")]
    figures = words.measure(rollouts, problems, None)
    assert (figures["words used"], figures["words missed"], figures["tokens"]) == (0.75, 0.25, 1.5)
    assert figures["stories"][0] == {"prompt": "a", "story": "A cat sat."}


def test_flops_of_grpo_and_distillation() -> None:
    config = chat_policy().config
    rows = [{**row, "prompt_ids": [0] * 2} for row in rows_of([1.0] * 8 + [0.0] * 7 + [1.0], length=3)]
    forward = 5 * flops_per_token(config, training=False)
    assert distillation.count_flops(config, rows, has_teacher=False) == forward * (16 + 3 * 8), "a group has no signal"
    assert distillation.count_flops(config, rows, has_teacher=True) == forward * 16 * 5


@pytest.mark.long
def test_the_experiment_of_additions_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short: dict[str, Any] = {"steps": 2, "warmup_steps": 0, "eval_interval": 1, "checkpoint_interval": 1}
    monkeypatch.setattr(addition, "SFT", replace(addition.SFT, **short))
    monkeypatch.setattr(addition, "REINFORCE", replace(addition.REINFORCE, batch_size=16, **short))
    monkeypatch.setattr(addition, "TEST_PROBLEMS", 4)
    figure = tmp_path / "figure.png"
    monkeypatch.setattr("sys.argv", ["addition", str(tmp_path), "--seeds", "1", "--figure", str(figure)])
    addition.main()
    first = capsys.readouterr().out
    assert set(json.loads(first)) == {"accuracy after sft", *addition.VARIANTS}
    assert figure.read_bytes().startswith(b"\x89PNG")
    addition.main()
    assert capsys.readouterr().out == first  # nothing is trained again
