"""Adapters in the flows: the base in a run, later stages on base and adapter, keys, and learning rates."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flows.config import PipelineConfig
from flows.pipeline import find_inputs, pipeline, prepare_training
from flows.plan import DryRunExecutor
from flows.posttrain import PosttrainConfig, posttrain
from lm.checkpoint.training_checkpoint import load_model
from lm.common.errors import UserError
from lm.model.config import AdapterConfig, ModelConfig
from lm.posttrain.config import ComparisonConfig, DialogsConfig, DPOConfig, GRPOConfig
from lm.text.config import DataConfig
from lm.tokenizer.config import TokenizerConfig
from lm.train.config import TrainConfig
from tasks.maintenance.gc import find_garbage
from tasks.posttrain import sft
from tasks.runs.models import resolve_model
from tasks.runtime.execution import Execution
from tasks.runtime.output import Output, Ref, read_output
from tasks.runtime.run_context import RunContext
from tasks.train import train
from tests.helpers.posttraining import PAIRS, quick_config
from textmill.runs.run_list import delete_run

pytestmark = pytest.mark.usefixtures("prefect_server")

EXECUTION = Execution(compile=False, device="cpu", threads=1)
ADAPTER = AdapterConfig(rank=2, alpha=8)


def pipeline_config(**sections: Any) -> PipelineConfig:
    sections = {"model": ModelConfig(context_length=48, d_model=16, num_layers=1, num_heads=2, d_ff=32)} | sections
    return PipelineConfig(data=DataConfig(train=["demo:100"]), execution=EXECUTION, **sections)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, prefect_server: None) -> Path:
    """A root with a finished run of the pipeline."""
    root = tmp_path_factory.mktemp("adapted")
    training = TrainConfig(steps=4, batch_size=2, warmup_steps=1, sample_tokens=2)
    pipeline(pipeline_config(train=training, tokenizer=TokenizerConfig(vocab_size=300)), str(root), until="train")
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
        reinforce=GRPOConfig(train=train, group_size=2, max_new_tokens=3, kl_weight=0.1),
        evaluate=ComparisonConfig(prompts=["Hello"], max_new_tokens=3),
        execution=EXECUTION,
        adapter=ADAPTER,
    )


def output(root: Path, record: dict[str, Any], stage: str) -> Output:
    return read_output(RunContext(str(root), "").store, Ref(stage, record["stages"][stage]["key"]))


@pytest.mark.slow
def test_each_method_adapts_the_model_before_it(root: Path, config: PosttrainConfig) -> None:
    record = posttrain(config, str(root))
    models = {}
    for stage in ("base", "sft", "preference", "reinforce"):
        out = output(root, record, stage)
        names = {file["path"] for file in out.manifest["files"]}
        checkpoint = out.best_checkpoint
        assert (f"{checkpoint}/adapter.safetensors" in names) == (stage != "base")
        assert (f"{checkpoint}/model.safetensors" in names) == (stage == "base")
        assert "base.json" not in names, "where the base is is no content"
        models[stage] = load_model(out.directory(checkpoint)).state_dict()["layers.0.ffn.w1.weight"]
    weights = [*models.values()]
    assert not torch.equal(weights[0], weights[1]) and not torch.equal(weights[1], weights[2])
    figures = output(root, record, "evaluate").manifest["figures"]
    assert figures.keys() == models.keys()
    resolved = resolve_model("", str(root))
    assert torch.equal(resolved.load("cpu")[0].state_dict()["layers.0.ffn.w1.weight"], weights[-1])
    assert resolved.read_context_length() == 48


def test_another_attempt_at_the_base_is_found(root: Path, config: PosttrainConfig) -> None:
    config = replace(config, methods=["sft"])
    record = posttrain(config, str(root), until="sft")
    before = output(root, record, "base")
    posttrain(config, str(root), until="base", refresh=("base",))
    after = output(root, record, "base")
    assert before.location != after.location
    store = RunContext(str(root), "").store
    for finding in find_garbage(store):
        if finding.path == "/".join(before.location):
            store.remove(finding.path)
    assert not Path(before.url).exists()
    out = output(root, record, "sft")
    load_model(out.directory(out.best_checkpoint))


def test_continued_pretraining(root: Path) -> None:
    start = resolve_model("", str(root)).name
    name = min((root / "runs").glob("2*.json")).stem  # the first one is that of the fixture
    training = TrainConfig(init_from=name, steps=4, batch_size=2, warmup_steps=1, sample_tokens=2)
    config = PipelineConfig(
        data=DataConfig(train=["demo:100"]), train=training, execution=EXECUTION, adapter=replace(ADAPTER, dropout=0.1)
    )
    assert start
    record = pipeline(config, str(root))
    out = output(root, record, "train")
    assert out.directory(out.best_checkpoint).joinpath("adapter.safetensors").exists()
    settings = out.manifest["ingredients"]["parameters"]
    assert settings["adapter"]["rank"] == 2 and settings["config"]["max_lr"] == pytest.approx(1e-2)
    resolve_model(record["name"], str(root)).load("cpu")
    store = RunContext(str(root), "").store
    _, findings = delete_run(store, name, is_confirmed=False)
    first = next(iter(settings["start"].values()))
    kept = {finding.path for finding in findings}
    assert not any(path.startswith("train/") for path in kept), f"the base {first} is needed"


def test_an_adapter_needs_a_model() -> None:
    with pytest.raises(UserError, match=r"adapter\.rank is 2: an adapter needs a trained model; name it in train.init"):
        pipeline_config(adapter=ADAPTER)


def test_keys_without_an_adapter_do_not_name_it(root: Path) -> None:
    """Those of existing roots stay; options of an adapter that is off count for nothing."""
    run = RunContext(str(root), "")
    for config in (pipeline_config(), pipeline_config(adapter=AdapterConfig(alpha=3.0))):
        with DryRunExecutor(run, config) as executor:
            training = prepare_training(config, find_inputs(config, run.store), executor)
        assert train.bind(*training.arguments).keys().isdisjoint({"adapter", "mix", "start"})
    plain = PosttrainConfig(adapter=AdapterConfig(alpha=3.0))
    assert plain.arguments("sft") == [plain.sft]
    assert sft.bind("model", "tokenizer", "data", *plain.arguments("sft")).keys() == {
        *("model", "tokenizer", "data", "config")
    }


def test_learning_rates() -> None:
    plain = PosttrainConfig(adapter=ADAPTER)
    settings, libraries, adapter = plain.arguments("sft")
    assert (settings.max_lr, settings.min_lr, libraries, adapter) == (pytest.approx(1e-3), 0, None, ADAPTER)
    assert plain.arguments("preference")[0] == replace(
        plain.preference, train=replace(plain.preference.train, max_lr=1e-5 * 10)
    )
    own = replace(plain, sft=replace(plain.sft, max_lr=3e-4))
    assert own.arguments("sft")[0] == own.sft, "a rate that the user set stays"
    floor = replace(plain, sft=replace(plain.sft, min_lr=5e-5))
    assert (floor.arguments("sft")[0].max_lr, floor.arguments("sft")[0].min_lr) == (pytest.approx(1e-3), 5e-5)
    muon = replace(plain, sft=replace(plain.sft, optimizer="muon"))
    assert muon.arguments("sft")[0] == muon.sft
    demo = PosttrainConfig.load_preset("demo")
    assert replace(demo, adapter=ADAPTER).arguments("sft")[0] == demo.sft
    assert replace(demo, adapter=ADAPTER).arguments("reinforce")[0].train.max_lr == pytest.approx(3e-3)
    assert pipeline_config().training == pipeline_config().train
