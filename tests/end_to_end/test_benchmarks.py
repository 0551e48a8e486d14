"""The benchmarks run and compare results, with input too small to measure speed."""

import io
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from itertools import chain, pairwise, repeat
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock, patch

import pytest
import torch

from benchmarks import curate_duplicates, learning, orchestration, texts, tokenizer
from benchmarks import generate as generation
from benchmarks import train as benchmark
from benchmarks.scale.costs import Costs, StepCost
from benchmarks.scale.model import Cluster, Corpus, bundle, predict, schedule
from lm.model.config import ModelConfig
from lm.text.demo_corpus import demo_stories
from lm.text.pretokenize import END_OF_TEXT
from tests.helpers.training import MODEL, small_data


def measure_here(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Measure in this process, as the process of ``command`` would."""
    with patch.object(sys, "argv", command[2:]), redirect_stdout(io.StringIO()) as output:
        tokenizer.main()
    return subprocess.CompletedProcess(command, 0, output.getvalue())


@pytest.mark.slow
def test_the_tokenizer_benchmark_compares_results(
    shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first measurement is a process of its own. The others are in this one, which has imported the libraries."""
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("".join(demo_stories(500)), encoding="utf-8")
    runs: Iterator[Callable[..., Any]] = chain([subprocess.run], repeat(measure_here))
    run = Mock(side_effect=lambda command, **options: next(runs)(command, **options))
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.chdir(Path(__file__).parents[2])
    vocabulary = ["--vocab", str(shared_data / "gpt2_vocab.json"), "--merges", str(shared_data / "gpt2_merges.txt")]
    monkeypatch.setattr(tokenizer, "CORPORA", {"stories": lambda: [corpus.read_bytes()]})
    options = ["--only", "encode,warm,count", "--rounds", "1", "--directory", str(tmp_path / "work"), "--json"]
    monkeypatch.setattr(sys, "argv", ["benchmarks.tokenizer", "--corpus", str(corpus), *vocabulary, *options])
    tokenizer.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["equal"] is True
    assert result["checks"] and run.call_count > 5
    assert all("is not installed" in note for note in result["notes"]), "none failed"
    assert all(ratio > 0 for ratio in result["ratios"].values())


@pytest.mark.parametrize("who", ["ours", "bound"])
def test_a_training_step_is_measured(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "lm.distributed.plan._MIN_FLOPS_TO_COMPILE", 0
    )  # the benchmark changes it; monkeypatch restores it
    monkeypatch.setitem(benchmark.SHAPES, "tiny", (ModelConfig(300, 16, 32, 1, 2, d_ff=64), 4))
    result = benchmark.measure(who, "tiny", "float32", False, torch.device("cpu"), 0.05)
    assert result["seconds"] > 0


@pytest.mark.slow
def test_generation_is_measured() -> None:
    result = generation.measure(generation.Job("ours", "float32", 2), "tiny", torch.device("cpu"))
    assert result["prefill"] > 0 and result["step"] > 0
    assert result["bytes"] > 4 * 500 * 64  # the head at least
    pytest.importorskip("transformers", reason="transformers is not installed")
    peer = generation.measure(generation.Job("transformers", "float32", 2), "tiny", torch.device("cpu"))
    assert peer["ids"] == result["ids"] and peer["prefill"] > 0 and peer["step"] > 0
    slower = {name: 3 * peer[name] for name in ("prefill", "step")}
    medians = {generation.Job("ours", "float32", 2): peer, generation.Job("transformers", "float32", 2): slower}
    assert generation.compare(medians, peer["bytes"] / peer["step"]) == pytest.approx(
        {"bandwidth_share_fp32_b2": 1, "decode_fp32_b2_vs_transformers": 3, "prefill_fp32_vs_transformers": 3}
    )


@pytest.mark.slow
@pytest.mark.parametrize("has_schemas", [False, True])
def test_the_server_benchmark_counts_requests(has_schemas: bool) -> None:
    for library in ("httpx", "jsonschema", "llguidance"):
        pytest.importorskip(library, reason=f"{library} is not installed")
    from benchmarks import serve

    result = serve.measure(clients=20, seconds=1, warm_up=0.2, has_schemas=has_schemas)
    assert result["whole"] >= 16 and result["left early"] >= 4, "each client sends at least one request"
    assert result["events"] > 16 * 8
    assert result["failed"] == result["left"] == 0 and result["scrapes"] >= 1
    if has_schemas:
        assert result["valid"] + result["cut"] == result["whole"]


@pytest.mark.slow
def test_the_prefix_cache_benchmark_computes_less() -> None:
    from benchmarks import prefix_cache

    result = prefix_cache.measure(turns=8, tokens=20, rounds=1)
    assert result["tokens"]["without"] == sum(20 * (2 * turn + 1) for turn in range(8))
    assert result["token_ratio"] <= 0.3 and result["time_ratio"] > 0


@pytest.mark.slow
def test_the_speculation_benchmark_accepts_guesses_where_text_repeats() -> None:
    from benchmarks import speculation

    result = speculation.measure("tiny", tokens=96, guesses=8, rounds=1)
    assert result["copy"]["accepted"] > 48 > result["prose"]["accepted"]
    assert result["copy"]["ratio"] > 0 < result["prose"]["ratio"]


@pytest.mark.long
def test_training_recipes_are_compared_by_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = small_data()
    adamw, fast, *_ = learning.recipes(data.tokenizer.size)
    assert adamw.model.context_length == fast.model.context_length and adamw.train.batch_size == fast.train.batch_size
    small = [
        replace(recipe, model=MODEL, train=replace(recipe.train, batch_size=2, precision="float32"), rates=rates)
        for recipe, rates in ((adamw, (1e-3, 1e-2, 1e-5)), (fast, (0.0, 0.01, 1e-5)))
    ]
    monkeypatch.setattr(learning, "recipes", lambda _: small)
    result = learning.compare(320, data, tmp_path, "cpu", seeds=2)
    fast_result = result["stories-fast"]
    assert fast_result["token_part"] > 0 and fast_result["token_part_error"] is not None
    assert len(fast_result["192 tokens"]) == len(fast_result["768 tokens"]) == 2
    assert fast_result["192 tokens"][0] == min(fast_result["rates"].values())
    runs = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert {path.name for path in tmp_path.iterdir()} >= {"adamw-0.01-320", "stories-fast-0-192"}
    assert learning.compare(320, data, tmp_path, "cpu", seeds=2) == result
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == runs


@pytest.fixture
def no_shared_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without ``../shared/data``."""
    for module in (texts, tokenizer):
        monkeypatch.setattr(module, "DATA", tmp_path / "none")
    monkeypatch.setattr(texts, "GENERATED_STORIES", {"train": 300, "valid": 30})


@pytest.mark.usefixtures("no_shared_data")
def test_generated_stories_replace_missing_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = learning.read_data(tmp_path / "made")
    assert capsys.readouterr().err.count("has no stories: generating some") == 2
    assert data.valid is not None and 0 < len(data.valid) < len(data.train) / 5
    written = {split: texts.story_file(split, tmp_path / "made").read_text() for split in ("train", "valid")}
    assert data.tokenizer.decode(data.train[0 : len(data.train)].tolist()) == written["train"]
    assert not set(written["valid"].split(END_OF_TEXT)[:-1]) & set(written["train"].split(END_OF_TEXT)[:-1])
    assert texts.stories.__wrapped__().decode() == written["train"]


@pytest.mark.usefixtures("no_shared_data")
def test_the_orchestration_benchmark_downloads_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        paths = command[command.index("--train") + 1], command[command.index("--valid") + 1]
        assert all(Path(path).stat().st_size for path in paths)
        return subprocess.CompletedProcess(command, 0, json.dumps({"wall": 1.0, "idle": 0.5, "cpu": 1.0}))

    monkeypatch.setattr(orchestration, "wait_for_server", lambda *_: None)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: MagicMock())
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["orchestration", "--rounds", "1"])
    orchestration.main()
    assert [command[-1] for command in commands] == ["direct", "prefect"]


@pytest.mark.usefixtures("no_shared_data")
def test_the_tokenizer_benchmark_names_its_missing_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tokenizer"])
    with pytest.raises(SystemExit) as ended:
        tokenizer.main()
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "gpt2_vocab.json is missing; name GPT-2's vocab.json and merges.txt" in last
    assert "--vocab and --merges" in last


def test_tokens_for_a_loss_are_interpolated_between_two_losses() -> None:
    assert learning.tokens_for(3.0, 100, 3.0, 2.5) == 100
    assert learning.tokens_for(2.5, 100, 3.0, 2.5) == 400
    assert learning.tokens_for(2.75, 100, 3.0, 2.5) == 200
    assert learning.tokens_for(2.5, 100, 3.0, 3.1) == math.inf


SCALE_COSTS = Costs(
    steps={
        "sources": StepCost(requests=5, seconds=0.03),
        "ingest-group": StepCost(requests=8, seconds=0.05),
        "chunk-group": StepCost(requests=9, seconds=0.05),
        "count-group": StepCost(fixed_requests=4, requests=15, seconds=0.1),
        "encode-group look-up": StepCost(requests=4, seconds=0.01),
        "encode-group": StepCost(requests=17, seconds=0.1),
        "encode": StepCost(requests=6, seconds=0.04),
    },
    hash_seconds_per_mb=0.002,
    ingest_seconds_per_mb=0.02,
    chunk_seconds_per_mb=0.002,
    chunk_seconds_per_chunk=1e-4,
    count_seconds_per_mb=0.01,
    encode_seconds_per_mb=0.01,
    sum_seconds_per_mb=0.5,
    merge_seconds_per_pretoken=1e-5,
    index_seconds_per_document=1e-8,
    pretokens_of_first_mb=2e4,
    heaps_exponent=0.5,
    bytes_per_pretoken=8,
    file_bytes_per_pretoken=8,
    shard_bytes_per_byte=0.7,
    bytes_per_document=2000,
    driver_base_mb=400,
    driver_kb_per_group=20,
    rows_per_run=0,
    rows_per_task_run=18,
    rows_per_group=2,
)


def scale_cluster(workers: int, latency_seconds: float = 0.02, threads_per_task: int = 1) -> Cluster:
    return Cluster(workers, 16, latency_seconds, 1.25e9, 12.5e9, 3_500, threads_per_task)


@pytest.mark.parametrize("threads_per_task", [1, 16])
def test_more_workers_never_make_a_run_slower_in_the_model(threads_per_task: int) -> None:
    runs = [
        predict(SCALE_COSTS, Corpus(1e12, 1e6, 1e9), scale_cluster(workers, 0.1, threads_per_task))
        for workers in (1, 2, 8, 9, 10, 13, 50, 100, 101, 1000)
    ]
    for slower, faster in pairwise(runs):
        assert all(faster.seconds[stage] <= seconds for stage, seconds in slower.seconds.items())
        assert faster.requests == slower.requests
    assert runs[-1].seconds["chunk"] < runs[0].seconds["chunk"] / 10
    hashing = 1e12 / 1.25e9  # by the driver, at its bandwidth
    assert runs[-1].seconds["ingest"] > hashing


def test_requests_grow_with_groups_and_not_with_chunks_in_the_model() -> None:
    few, many = (predict(SCALE_COSTS, Corpus(1e12, size, 1e9), scale_cluster(10)) for size in (1.6e6, 1e5))
    assert many.groups < 1.5 * few.groups
    assert sum(many.requests.values()) < 1.2 * sum(few.requests.values())
    assert max(few.task_runs, many.task_runs) < 6 * 256  # ingest, chunk, count, sums, encode of both splits
    assert sum(Corpus(1e12, 1e5, 1e9).groups([4e11, 6e11])) == pytest.approx(1e12)


def test_tasks_are_scheduled_in_their_order() -> None:
    assert schedule([3, 1, 1, 1], 2) == 3
    assert schedule([1, 1, 3], 2) == 4
    assert [len(part) for part in bundle(range(600), 64)] == [3] * 200
    assert [len(part) for part in bundle(range(600), 1)] == [38] * 15 + [30]


def test_the_duplicates_of_a_generated_corpus_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(curate_duplicates, "stories", lambda: b" ".join(b"word%d" % i for i in range(2000)))
    curate_duplicates.write_corpus(tmp_path, 1_000_000)
    curate_duplicates.deduplicate(tmp_path)
    result = json.loads(capsys.readouterr().out)
    copies, share = result["documents"] / 20, result["near"] / result["documents"]
    assert copies / 3 < result["equal"] < 3 * copies  # one in 20 is a copy, some of a copy that was changed
    assert 0.1 < share < 0.25 and 0.5 < result["kept_line_share"] < 0.9
    assert [path.name for path in tmp_path.iterdir()] == ["000.txt"]
