"""The benchmarks, on what is too small to tell anything about speed: that they run, and compare."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import generate as generation
from benchmarks import learning
from benchmarks import train as benchmark
from lm.demo_corpus import demo_stories
from lm.model import ModelConfig
from tests.training import MODEL, make_data


def test_the_tokenizers_benchmark_compares_results(shared_data: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("".join(demo_stories(3000)), encoding="utf-8")
    vocabulary = ["--vocab", str(shared_data / "gpt2_vocab.json"), "--merges", str(shared_data / "gpt2_merges.txt")]
    command = [sys.executable, "-m", "benchmarks.tokenizer", "--corpus", str(corpus), *vocabulary]
    done = subprocess.run(
        [*command, "--only", "encode,count", "--rounds", "1", "--directory", str(tmp_path / "work"), "--json"],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["equal"] is True
    assert result["checks"]
    assert all(ratio > 0 for ratio in result["ratios"].values())


@pytest.mark.parametrize("who", ["ours", "bound"])
def test_a_step_of_training_is_measured(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lm.trainer._COMPILE_FLOPS", 0)  # the benchmark sets it; this takes it back
    monkeypatch.setitem(benchmark.SHAPES, "tiny", (ModelConfig(300, 16, 32, 1, 2, d_ff=64), 4))
    found = benchmark.measure(who, "tiny", "float32", False, torch.device("cpu"), 0.05)
    assert found["seconds"] > 0


def test_drawing_tokens_is_measured() -> None:
    found = generation.measure(generation.Job("ours", "float32", 2), "tiny", torch.device("cpu"))
    assert found["prefill"] > 0 and found["step"] > 0
    assert found["bytes"] > 4 * 500 * 64  # the head at least
    pytest.importorskip("transformers", reason="transformers is what ours is measured beside")
    theirs = generation.measure(generation.Job("transformers", "float32", 2), "tiny", torch.device("cpu"))
    assert theirs["ids"] == found["ids"] and theirs["prefill"] > 0 and theirs["step"] > 0
    slower = {name: 3 * theirs[name] for name in ("prefill", "step")}
    medians = {generation.Job("ours", "float32", 2): theirs, generation.Job("transformers", "float32", 2): slower}
    assert generation.compare(medians, theirs["bytes"] / theirs["step"]) == pytest.approx(
        {"bandwidth_share_fp32_b2": 1, "decode_fp32_b2_vs_transformers": 3, "prefill_fp32_vs_transformers": 3}
    )


def test_a_server_bears_many_clients() -> None:
    pytest.importorskip("httpx", reason="httpx is not installed")
    from benchmarks import serve

    found = serve.measure(clients=20, seconds=1)
    assert found["whole"] >= 16 and found["left early"] >= 4, "each client asks at least once"
    assert found["events"] > 16 * 8
    assert found["failed"] == found["left"] == 0


def test_the_recipes_are_compared_by_the_tokens_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = make_data()
    adamw, fast = learning.recipes(data.tokenizer.size)
    assert adamw.model.context_length == fast.model.context_length and adamw.train.batch_size == fast.train.batch_size
    small = [
        replace(recipe, model=MODEL, train=replace(recipe.train, batch_size=2, precision="float32"), rates=rates)
        for recipe, rates in ((adamw, (1e-3, 1e-2, 1e-5)), (fast, (0.0, 0.01, 1e-5)))
    ]
    monkeypatch.setattr(learning, "recipes", lambda _: small)
    found = learning.compare(320, data, tmp_path, "cpu")
    assert found["tokens_to_loss"] > 0
    losses = found["fast"]["192 tokens"]
    assert found["fast"]["768 tokens"].keys() == {min(losses, key=losses.__getitem__)}
    runs = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert {path.name for path in tmp_path.iterdir()} >= {"adamw-0.01-320", "fast-0-192"}
    assert learning.compare(320, data, tmp_path, "cpu") == found
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == runs


def test_the_tokens_that_a_loss_wants_are_on_the_line_through_two_losses() -> None:
    assert learning.tokens_for(3.0, 100, 3.0, 2.5) == 100
    assert learning.tokens_for(2.5, 100, 3.0, 2.5) == 400
    assert learning.tokens_for(2.75, 100, 3.0, 2.5) == 200
    assert learning.tokens_for(2.5, 100, 3.0, 3.1) == math.inf
