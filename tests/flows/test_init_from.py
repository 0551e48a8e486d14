"""Continued pretraining: a run that starts from the model of another run, or from files."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flows.config import PipelineConfig
from flows.pipeline import pipeline, pipeline_stages
from flows.plan import plan
from flows.posttrain import PosttrainConfig
from flows.sweep_config import SweepConfig
from flows.train_job import write_train_job
from lm.checkpoint.hugging_face.model_files import load_hugging_face, save_hugging_face
from lm.checkpoint.training_checkpoint import load_model
from lm.common.errors import UserError
from lm.experiments.axes import Axis
from lm.inference.config import SampleConfig
from lm.model.config import ModelConfig, RopeScaling
from lm.model.transformer import TransformerLM
from lm.posttrain.config import DPOConfig
from lm.text.config import ChunkConfig, DataConfig
from lm.text.demo_corpus import demo_stories
from lm.tokenizer.config import TokenizerConfig
from lm.train.config import TrainConfig
from lm.train.pretraining import Job
from tasks.runs.models import resolve_model
from tasks.runtime.execution import Execution
from tasks.runtime.output import Output, Ref, read_output
from tasks.runtime.run_context import RunContext
from tests.helpers.llamas import assert_same_weights
from tests.helpers.tokenizers import bytes_tokenizer

pytestmark = pytest.mark.usefixtures("prefect_server")

SHAPE: dict[str, Any] = {"d_model": 16, "num_layers": 1, "num_heads": 2, "d_ff": 32}
STILL = {"steps": 1, "max_lr": 0.0, "min_lr": 0.0, "warmup_steps": 0}  # no step changes a weight


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("text")
    for name, count in (("train", 100), ("valid", 20)):
        (directory / f"{name}.txt").write_text("".join(demo_stories(count)), encoding="utf-8")
    return directory


@pytest.fixture(scope="module")
def root(text: Path, tmp_path_factory: pytest.TempPathFactory, prefect_server: None) -> Path:
    """A root with a finished run, whose model was trained for some steps."""
    root = tmp_path_factory.mktemp("continued") / "root"
    config = make_config(text, steps=30, max_lr=1e-2, min_lr=1e-3, warmup_steps=2)
    pipeline(replace(config, model=ModelConfig(context_length=16, **SHAPE)), str(root), until="train")
    return root


def make_config(text: Path, **train: Any) -> PipelineConfig:
    settings = {"batch_size": 4, "eval_interval": 50, "eval_sequences": 2, "sample_tokens": 2, **train}
    return PipelineConfig(
        data=DataConfig(train=[str(text / "train.txt")], valid=[str(text / "valid.txt")]),
        chunk=ChunkConfig(target_bytes=16_000),
        tokenizer=TokenizerConfig(vocab_size=300) if "init_from" not in train else TokenizerConfig(),
        train=TrainConfig(**settings),
        sample=SampleConfig(prompts=["Once"], max_new_tokens=3),
        execution=Execution(compile=False, device="cpu", threads=1),
    )


def output(root: Path, record: dict[str, Any], stage: str) -> Output:
    return read_output(RunContext(str(root), "").store, Ref(stage, record["stages"][stage]["key"]))


def first_record(root: Path) -> dict[str, Any]:
    path = min(path for path in (root / "runs").glob("2*.json"))
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def write_directory(directory: Path, **options: Any) -> Path:
    """Write a small model with a byte tokenizer as Hugging Face's files."""
    torch.manual_seed(7)
    model = TransformerLM(ModelConfig(257, 24, **SHAPE, **options))
    save_hugging_face(model, bytes_tokenizer(["<|endoftext|>"]), directory)
    return directory


@pytest.mark.slow
def test_a_run_continues_at_the_loss_of_its_start(root: Path, text: Path) -> None:
    first = first_record(root)
    before = output(root, first, "train")
    record = pipeline(make_config(text, init_from=first["name"], **STILL), str(root))
    assert [*record["stages"]] == ["merge", "ingest", "chunk", "encode", "train", "sample"]
    made = [name for name, stage in record["stages"].items() if stage["state"] == "made"]
    assert made == ["train", "sample"], "the text was encoded with this tokenizer before"
    after = output(root, record, "train")
    weights = [load_model(out.directory(out.json("training.json")["best"])) for out in (before, after)]
    assert weights[0].config == weights[1].config
    assert_same_weights(*weights)
    losses = [out.manifest["figures"]["valid_loss"] for out in (before, after)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)
    learned = pipeline(
        make_config(text, init_from=first["name"], steps=30, max_lr=1e-3, min_lr=1e-4, warmup_steps=2), str(root)
    )
    assert output(root, learned, "train").manifest["figures"]["valid_loss"] < losses[0] - 0.01
    resolved = resolve_model(learned["name"], str(root))
    assert resolved.load("cpu")[1].size == 300


@pytest.mark.slow
def test_a_directory_is_imported_and_its_content_is_in_the_key(root: Path, text: Path, tmp_path: Path) -> None:
    directory = write_directory(tmp_path / "theirs", qkv_bias=True)
    config = make_config(text, init_from=str(directory), **STILL)
    rows = dict(plan(pipeline_stages, config, str(root), None, ()))
    assert rows["import"] == "runs" and rows["train"].startswith("runs if the content of ")
    record = pipeline(config, str(root))
    assert [*record["stages"]] == ["import", "ingest", "chunk", "encode", "train", "sample"]
    out = output(root, record, "train")
    model = load_model(out.directory(out.json("training.json")["best"]))
    assert_same_weights(model, load_hugging_face(directory))
    assert (model.config.vocab_size, model.config.context_length) == (257, 24)
    assert resolve_model(record["name"], str(root)).load("cpu")[1].size == 257
    moved = directory.rename(tmp_path / "moved")
    config = replace(config, train=replace(config.train, init_from=str(moved)))
    again = pipeline(config, str(root))
    assert again["stages"]["train"]["state"] == "cached", "the name of the directory decides nothing"
    other = write_directory(tmp_path / "other", qkv_bias=True, num_kv_heads=1)
    config = replace(config, train=replace(config.train, init_from=str(other)))
    assert pipeline(config, str(root), until="train")["stages"]["train"]["state"] == "made"


@pytest.mark.slow
def test_context_and_positions_may_change(root: Path, text: Path) -> None:
    name = first_record(root)["name"]
    scaling = RopeScaling("linear", factor=2.0)
    config = replace(
        make_config(text, init_from=name, **STILL), model=ModelConfig(context_length=32, rope_scaling=scaling)
    )
    out = output(root, pipeline(config, str(root), until="train"), "train")
    model = load_model(out.directory(out.json("training.json")["best"]))
    assert (model.config.context_length, model.config.rope_scaling, model.config.d_model) == (32, scaling, 16)


@pytest.mark.slow
def test_a_job_for_other_machines_continues_too(root: Path, text: Path, tmp_path: Path) -> None:
    first = first_record(root)
    config = make_config(text, init_from=first["name"], steps=3, warmup_steps=1)
    pipeline(config, str(root), until="encode")
    job = Job.read(write_train_job(config, str(root)))
    out = output(root, first, "train")
    best = out.directory(out.json("training.json")["best"])
    assert Path(job.start).resolve() == best.resolve()
    assert job.digests["start"] == out.digest
    assert_same_weights(job.make_trainer(tmp_path, torch.device("cpu")).model, load_model(best))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda config: replace(config, model=ModelConfig(d_model=24, num_heads=2)),
            r"model\.d_model 24 conflicts with train\.init_from, whose model has 16; leave model\.d_model out",
        ),
        (lambda config: replace(config, model=ModelConfig(qk_norm=True)), r"model\.qk_norm True conflicts"),
        (lambda config: replace(config, model=ModelConfig(vocab_size=301)), r"model\.vocab_size 301 conflicts"),
        (
            lambda config: replace(config, tokenizer=TokenizerConfig(vocab_size=400)),
            r"tokenizer\.vocab_size conflicts with train\.init_from",
        ),
        (
            lambda config: replace(config, data=replace(config.data, separator="<|end|>")),
            r"data\.separator '<\|end\|>' is not among the special tokens .*: '<\|endoftext\|>'",
        ),
        (lambda config: replace(config, budget="1e15flops"), "budget chooses a new model"),
        (
            lambda config: replace(config, train=replace(config.train, init_from="no-such-run")),
            "There is no model 'no-such-run'",
        ),
    ],
    ids=["width", "norms", "vocabulary", "tokenizer", "separator", "budget", "name"],
)
def test_what_does_not_fit_is_refused_by_name(
    root: Path, text: Path, change: Callable[[PipelineConfig], PipelineConfig], message: str
) -> None:
    config = change(make_config(text, init_from=first_record(root)["name"], **STILL))
    with pytest.raises(UserError, match=message):
        plan(pipeline_stages, config, str(root), None, ())


@pytest.mark.parametrize("until", ["count", "merge"])
def test_there_is_no_stage_that_makes_a_tokenizer(root: Path, text: Path, until: str) -> None:
    config = make_config(text, init_from=first_record(root)["name"], **STILL)
    with pytest.raises(UserError, match=f"There is no stage {until}: the tokenizer is that of the model"):
        plan(pipeline_stages, config, str(root), until, ())


def test_other_flows_refuse_the_option() -> None:
    train = TrainConfig(init_from="a-run")
    with pytest.raises(UserError, match="sft starts from the model before it"):
        PosttrainConfig(sft=train)
    with pytest.raises(UserError, match="preference starts from the model before it"):
        PosttrainConfig(preference=DPOConfig(train=train))
    with pytest.raises(UserError, match=r"points of a sweep train new models; leave train\.init_from out"):
        SweepConfig(base=PipelineConfig(train=train), axes=[Axis("train.max_lr", [1e-3, 2e-3])])
