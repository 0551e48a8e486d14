"""The flow ``posttrain``: stages, cache, resumed models and errors."""

import json
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from flows.config import PipelineConfig
from flows.pipeline import pipeline
from flows.plan import cached_run, plan
from flows.posttrain import PosttrainConfig, posttrain, posttrain_stages
from lm.checkpoint.hugging_face.model_files import save_hugging_face
from lm.checkpoint.training_checkpoint import load_model
from lm.common.errors import UserError
from lm.data.chat_template import find_template
from lm.eval import wilson_interval
from lm.model.config import ModelConfig
from lm.posttrain.config import (
    ComparisonConfig,
    DialogsConfig,
    DistillConfig,
    DPOConfig,
    GRPOConfig,
    PPOConfig,
    RewardModelConfig,
)
from lm.text.config import DataConfig
from lm.tokenizer import Tokenizer
from lm.tokenizer.config import TokenizerConfig
from lm.train.config import TrainConfig
from lm.train.tracking import read_metrics
from tasks.runs.models import RunModel, resolve_model
from tasks.runtime.execution import Execution
from tasks.runtime.output import Output, Ref, read_output
from tasks.runtime.run_context import RunContext
from tasks.sample import load_trained
from tests.helpers.posttraining import PAIRS, quick_config
from textmill.runs.compare_runs import _QUANTITIES

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture(scope="module")
def trained_root(tmp_path_factory: pytest.TempPathFactory, prefect_server: None) -> Path:
    """A root with a finished run of the pipeline."""
    root = tmp_path_factory.mktemp("trained")
    config = PipelineConfig(
        data=DataConfig(train=["demo:100"]),
        tokenizer=TokenizerConfig(vocab_size=300),
        model=ModelConfig(context_length=48, d_model=16, num_layers=1, num_heads=2, d_ff=32),
        train=TrainConfig(steps=2, batch_size=2, warmup_steps=1, sample_tokens=2),
        execution=Execution(compile=False, device="cpu"),
    )
    pipeline(config, str(root), until="train")
    return root


@pytest.fixture
def config(tmp_path: Path) -> PosttrainConfig:
    rows = [{"prompt": p.prompt[0]["content"], "chosen": p.chosen, "rejected": p.rejected} for p in PAIRS]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train = quick_config(steps=2, sample_prompts=["1 + 1 ="])
    return PosttrainConfig(
        methods=["sft", "preference", "reinforce"],
        dialogs=DialogsConfig(
            train=[str(tmp_path / "pairs.jsonl")], task="addition:1-1", train_problems=40, test_problems=4
        ),
        sft=train,
        preference=DPOConfig(train=train),
        reward_model=RewardModelConfig(train=train),
        reinforce=GRPOConfig(train=train, group_size=2, max_new_tokens=3),
        ppo=PPOConfig(train=train, max_new_tokens=3),
        evaluate=ComparisonConfig(prompts=["Hello"], max_new_tokens=3),
        execution=Execution(compile=False, device="cpu"),
    )


def output(root: Path, record: dict[str, Any], stage: str) -> Output:
    return read_output(RunContext(str(root), "").store, Ref(stage, record["stages"][stage]["key"]))


def has_curves(training: Output) -> bool:
    """Return whether the metrics have what ``textmill compare`` draws of the stage."""
    metrics = {name for row in read_metrics(training.path("metrics.jsonl")) for name in row}
    quantity = _QUANTITIES[training.ref.stage]
    return {quantity.train, quantity.valid} <= metrics and quantity.valid in training.manifest["figures"]


def made(record: dict[str, Any]) -> list[str]:
    return [name for name, stage in record["stages"].items() if stage["state"] == "made"]


@pytest.mark.slow
def test_all_stages_run_once_and_each_page_shows_its_curves(
    trained_root: Path, config: PosttrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = posttrain(config, str(trained_root))
    stages = ["base", "dialogs", "sft", "preference", "reinforce", "evaluate"]
    assert made(record) == stages
    assert {action for _, action in plan(posttrain_stages, config, str(trained_root), None, ())} == {"cached"}
    again = cached_run(posttrain_stages, config, str(trained_root), None)
    assert again is not None and made(again) == []
    pages = {stage: output(trained_root, record, stage).page or "" for stage in stages[1:]}
    counts = output(trained_root, record, "dialogs").manifest["figures"]["problems"]
    assert counts["train"] + counts["valid"] == 40 and counts["valid"] and counts["test"] == 4
    assert f"| problems | {counts['train']} | {counts['valid']} | 4 |" in pages["dialogs"]
    assert "![reward](data:image/png" in pages["reinforce"] and "![loss](" in pages["sft"]
    assert "![margin between the rewards of a pair](" in pages["preference"]
    assert "| prompt | base | sft | preference | reinforce |" in pages["evaluate"]
    assert all(has_curves(output(trained_root, record, stage)) for stage in ("sft", "preference", "reinforce"))
    monkeypatch.setattr("lm.eval.problems.reward_libraries", lambda task, rewards: {"math_verify": "9"})
    rows = dict(plan(posttrain_stages, config, str(trained_root), None, ()))
    assert rows["preference"] == "cached" and "libraries.math_verify" in rows["reinforce"]
    figures = output(trained_root, record, "evaluate").manifest["figures"]
    assert figures.keys() == {"base", "sft", "preference", "reinforce"}
    assert all(0 <= part["reward"] <= 1 and part["answer_loss"] > 0 for part in figures.values())
    assert "| held out | accuracy, 95 % interval | right | wrong answer | wrong format |" in pages["evaluate"]
    for name, part in figures.items():
        right = part["categories"]["right"]
        assert sum(part["categories"].values()) == part["problems"] == 4 and part["accuracy"] == right / 4
        low, high = (100 * end for end in wilson_interval(right, 4))
        assert (
            f"| {name} | {25 * right:.1f} % [{low:.1f}, {high:.1f}] | {right} ({right / 4:.0%}) |" in pages["evaluate"]
        )
    model = resolve_model("", str(trained_root))
    assert isinstance(model, RunModel)
    assert (model.model.ref.stage, model.tokenizer.ref.stage) == ("reinforce", "base")
    loaded, loaded_tokenizer = load_trained(model.model, model.tokenizer, "cpu")
    assert find_template(loaded_tokenizer) and loaded.config.vocab_size == loaded_tokenizer.size


@pytest.mark.slow
def test_a_change_reruns_what_depends_on_it(trained_root: Path, config: PosttrainConfig) -> None:
    config = replace(config, methods=["sft", "reinforce"])
    posttrain(config, str(trained_root))
    other = replace(config, reinforce=replace(config.reinforce, kl_weight=0.1))
    rows = dict(plan(posttrain_stages, other, str(trained_root), None, ()))
    assert rows["sft"] == "cached"
    assert rows["reinforce"].startswith("runs: ")
    assert rows["evaluate"] == "runs if the content of reinforce changes"
    assert made(posttrain(other, str(trained_root), until="reinforce")) == ["reinforce"]


def test_the_base_is_the_trained_model_with_more_ids(trained_root: Path, config: PosttrainConfig) -> None:
    record = posttrain(config, str(trained_root), until="base")
    base = output(trained_root, record, "base")
    grown = load_model(base.directory(base.json("training.json")["best"]))
    assert grown.config.vocab_size == 304
    assert made(posttrain(config, str(trained_root), until="base", refresh=("base",))) == ["base"]
    assert output(trained_root, record, "base").digest == base.digest


@pytest.mark.slow
@pytest.mark.parametrize("task", ["addition:1-1", ""])
def test_ppo_learns_from_a_reward_model(
    trained_root: Path, config: PosttrainConfig, task: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = replace(
        config, methods=["ppo", "reward_model", "sft"], dialogs=replace(config.dialogs, task=task, valid_fraction=0.4)
    )
    if not task:  # the prompts of the pairs
        config = replace(config, methods=["ppo", "reward_model"])
    record = posttrain(config, str(trained_root))
    stages = ["base", "dialogs", *(["sft"] if task else []), "reward_model", "ppo", "evaluate"]
    assert list(record["stages"]) == stages
    assert "Cannot publish the artifact" not in caplog.text
    assert has_curves(output(trained_root, record, "ppo"))
    page = output(trained_root, record, "ppo").page or ""
    assert "![learned reward](data:image/png" in page and ("![reward](" in page) == bool(task)
    assert "![share of pairs in the right order](" in (output(trained_root, record, "reward_model").page or "")
    figures = output(trained_root, record, "evaluate").manifest["figures"]
    assert list(figures) == ["base", *(["sft"] if task else []), "ppo"]
    model = resolve_model("", str(trained_root))
    assert isinstance(model, RunModel) and model.model.ref.stage == "ppo"
    model.load("cpu")
    other = replace(config, reward_model=replace(config.reward_model, center_weight=0.1))
    rows = dict(plan(posttrain_stages, other, str(trained_root), None, ()))
    assert rows["reward_model"].startswith("runs: ") and rows["ppo"] == "runs if the content of reward_model changes"


@pytest.mark.slow
def test_distillation_learns_from_a_run_or_a_directory(
    trained_root: Path, tmp_path: Path, config: PosttrainConfig
) -> None:
    train = quick_config(steps=2, sample_prompts=[])
    root, data = str(trained_root), replace(config.dialogs, solutions=0)
    posttrain(replace(config, name="teacher", methods=["sft"]), root, until="sft")
    other = replace(config, name="second-teacher", methods=["sft"], sft=replace(config.sft, seed=5))
    posttrain(other, root, until="sft")
    config = replace(
        config,
        methods=["distill"],
        dialogs=data,
        distill=DistillConfig(teacher="teacher", train=train, max_new_tokens=3),
    )
    record = posttrain(config, root)
    assert list(record["stages"]) == ["base", "dialogs", "distill", "evaluate"]
    distilled = output(trained_root, record, "distill")
    assert has_curves(distilled) and "![divergence from the teacher, nats per token](" in (distilled.page or "")
    assert output(trained_root, record, "evaluate").manifest["figures"].keys() == {"base", "distill"}
    model = resolve_model("", root)
    assert isinstance(model, RunModel) and model.model.ref.stage == "distill"
    tokenizer = model.load("cpu")[1]
    assert isinstance(tokenizer, Tokenizer)

    def planned(teacher: str) -> str:
        rows = plan(posttrain_stages, replace(config, distill=replace(config.distill, teacher=teacher)), root, None, ())
        return dict(rows)["distill"]

    teacher = resolve_model("teacher", root)
    assert teacher.name != "teacher" and planned(teacher.name) == "cached", "the key holds the content, not the name"
    assert planned("second-teacher") == "runs: new content of sft"
    save_hugging_face(teacher.load("cpu")[0], tokenizer, tmp_path / "exported")
    config = replace(config, distill=replace(config.distill, teacher=str(tmp_path / "exported")))
    again = output(trained_root, posttrain(config, root, until="distill"), "distill")
    checkpoints = (out.directory(out.best_checkpoint) for out in (distilled, again))
    states = [load_model(checkpoint).state_dict() for checkpoint in checkpoints]
    assert all(torch.equal(weight, states[1][name]) for name, weight in states[0].items())


def test_a_teacher_with_other_tokens_is_refused_before_the_dialogs_are_read(
    trained_root: Path, config: PosttrainConfig
) -> None:
    plain = min((trained_root / "runs").glob("2*.json")).stem  # the pretraining of the fixture
    config = replace(config, methods=["sft", "distill"], distill=replace(config.distill, teacher=plain))
    config = replace(config, dialogs=replace(config.dialogs, seed=77))
    with pytest.raises(UserError, match=r"other tokens than the model that learns: 300 and 304, .* 300: None and"):
        posttrain(config, str(trained_root))
    rows = dict(
        plan(posttrain_stages, replace(config, methods=["sft"], distill=DistillConfig()), str(trained_root), None, ())
    )
    assert rows["dialogs"].startswith("runs")
    with pytest.raises(UserError, match=r"There is no model 'unknown'"):
        posttrain(replace(config, distill=replace(config.distill, teacher="unknown")), str(trained_root))


@pytest.mark.slow
def test_mistakes_are_named(
    trained_root: Path, tmp_path: Path, config: PosttrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="has no finished model"):
        posttrain(config, str(tmp_path / "empty"))
    with pytest.raises(UserError, match="There is no model 'other'"):
        posttrain(replace(config, base="other"), str(trained_root))
    with pytest.raises(UserError, match="methods has ppo without reward_model"):
        replace(config, methods=["sft", "ppo"])
    with pytest.raises(UserError, match=r"methods has distill, which learns .* name it in distill\.teacher"):
        replace(config, methods=["sft", "distill"])
    with pytest.raises(UserError, match=r"distill\.teacher names a teacher, but methods has no distill"):
        replace(config, distill=DistillConfig(teacher="big"))
    with pytest.raises(UserError, match=r"reinforce\.rewards and ppo\.rewards differ"):
        replace(config, methods=["reward_model", "reinforce", "ppo"], ppo=replace(config.ppo, rewards={"exact": 0.5}))
    with pytest.raises(UserError, match=r"train_deployment is for the pipeline"):
        replace(config, execution=replace(config.execution, train_deployment="pipeline/gpu-train"))
    with pytest.raises(UserError, match=r"files of a task; name it in dialogs\.task"):
        replace(config, dialogs=replace(config.dialogs, task="", task_test=["test.jsonl"]))
    with pytest.raises(UserError, match="sft reads its examples in shuffled epochs in any case; leave data_order out"):
        replace(config, sft=replace(config.sft, data_order="shuffled_epochs"))
    judged = replace(config, reinforce=replace(config.reinforce, rewards={"r1_zero": 1.0}))
    with monkeypatch.context() as patch:
        patch.setattr("lm.eval.problems.metadata.version", Mock(side_effect=PackageNotFoundError("math_verify")))
        for until in ("reinforce", None):
            with pytest.raises(UserError, match=r"pip install 'textmill\[math\]'"):
                judged.check_stages(until, ())
        judged.check_stages("sft", ())
    with pytest.raises(UserError, match="There is no stage ppo: methods is sft, preference, reinforce"):
        posttrain(config, str(trained_root), until="ppo")
    without = replace(config, methods=["preference"], dialogs=replace(config.dialogs, train=[]))
    with pytest.raises(UserError, match=r"There are no pairs for the stage preference\. Name some in dialogs\.train"):
        posttrain(without, str(trained_root))
