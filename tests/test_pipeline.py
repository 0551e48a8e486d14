"""The whole chain under Prefect: what is cached, what runs again, and that the outputs are the same."""

import logging
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flows.config import PipelineConfig
from flows.pipeline import pipeline
from flows.plan import plan
from lm.bpe import TokenizerConfig
from lm.chunks import ChunkConfig
from lm.corpus import DataConfig
from lm.demo_corpus import demo_stories
from lm.errors import UserError
from lm.execution import Execution
from lm.model import ModelConfig
from lm.recipe import TrainConfig
from lm.sampling import SampleConfig
from tasks.output import Output, Ref, read_output
from tasks.stage import Run

pytestmark = pytest.mark.usefixtures("prefect_server")

STAGES = ["ingest", "chunk", "count", "merge", "encode", "train", "sample"]


def write_corpus(path: Path, documents: int) -> None:
    path.write_text("".join(demo_stories(documents)), encoding="utf-8")


@pytest.fixture
def config(tmp_path: Path) -> PipelineConfig:
    write_corpus(tmp_path / "train.txt", 200)
    write_corpus(tmp_path / "valid.txt", 30)
    return PipelineConfig(
        data=DataConfig(train=[str(tmp_path / "train.txt")], valid=[str(tmp_path / "valid.txt")]),
        chunk=ChunkConfig(target_bytes=16_000),
        tokenizer=TokenizerConfig(vocab_size=300),
        model=ModelConfig(context_length=16, d_model=16, num_layers=1, num_heads=2, d_ff=32),
        train=TrainConfig(steps=4, batch_size=2, warmup_steps=1, eval_interval=2, eval_sequences=2, sample_tokens=2),
        sample=SampleConfig(prompts=["Once"], max_new_tokens=3),
        execution=Execution(compile=False),
    )


class Runner:
    """Runs the pipeline over one root and tells what it made."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.record: dict[str, Any] = {}

    def __call__(self, config: PipelineConfig, **options: Any) -> list[str]:
        self.record = pipeline(config, str(self.root), **options)
        return [name for name, stage in self.record["stages"].items() if stage["state"] == "made"]

    def output(self, stage: str) -> Output:
        return read_output(Run(str(self.root), "").store, Ref(stage, self.record["stages"][stage]["key"]))

    def parts(self, stage: str, made_in_last_run: bool = False) -> list[Output]:
        """The outputs of a mapped stage for each chunk."""
        store = Run(str(self.root), "").store
        outputs = [read_output(store, Ref(stage, key)) for key in store.names(stage) if not key.endswith(".json")]
        name = self.record["name"]
        return [out for out in outputs if not made_in_last_run or out.manifest["made"]["run"] == name]


@pytest.fixture
def run(tmp_path: Path) -> Runner:
    return Runner(tmp_path / "root")


def test_a_second_run_is_all_cached_and_execution_changes_nothing(run: Runner, config: PipelineConfig) -> None:
    assert run(config) == STAGES
    assert len(run.parts("count-chunk")) > 3
    assert run(config) == []
    assert run(replace(config, execution=Execution(threads=1, log_interval=3, compile=False))) == []
    assert {fate.split(",")[0] for _, fate in plan(config, str(run.root), None, ())} == {"cached"}


def test_each_change_reruns_what_depends_on_it(run: Runner, config: PipelineConfig) -> None:
    run(config)
    assert run(replace(config, sample=SampleConfig(prompts=["One"], max_new_tokens=3))) == ["sample"]
    longer = replace(config, train=replace(config.train, steps=5))
    rows = dict(plan(longer, str(run.root), None, ()))
    assert rows["encode"] == "cached"
    assert rows["train"] == "runs: changed since its last result: parameters.config.steps"
    assert rows["sample"] == "runs if the content of train changes"
    assert run(longer) == ["train", "sample"]
    smaller = replace(config, tokenizer=TokenizerConfig(vocab_size=290))
    assert run(smaller) == ["merge", "encode", "train", "sample"]
    assert not run.parts("count-chunk", made_in_last_run=True)


def test_until_stops_and_refresh_reruns(run: Runner, config: PipelineConfig) -> None:
    assert run(config, until="merge") == STAGES[:4]
    assert run(config) == STAGES[4:]
    before = run.output("merge")
    assert run(config, refresh=("merge",)) == ["merge"], "the same content: what follows stays cached"
    assert run.output("merge").manifest["attempt"] != before.manifest["attempt"]
    assert run.output("merge").digest == before.digest
    assert run(config, until="count", refresh=("count",)) == ["count"]
    assert len(run.parts("count-chunk", made_in_last_run=True)) == len(run.parts("count-chunk"))


def test_a_deleted_shard_is_restored_alone(run: Runner, config: PipelineConfig) -> None:
    run(config, until="encode")
    shard = run.parts("encode-chunk")[1]
    content = shard.path("tokens.bin").read_bytes()
    shard.path("tokens.bin").unlink()
    assert run(config, until="encode") == []
    (made,) = run.parts("encode-chunk", made_in_last_run=True)
    assert made.ref == shard.ref
    assert made.path("tokens.bin").read_bytes() == content


@pytest.mark.parametrize("stage", ["ingest", "chunk", "count", "merge", "encode", "train", "sample"])
def test_a_flipped_byte_is_noticed_and_repaired(run: Runner, config: PipelineConfig, stage: str) -> None:
    run(config)
    output = run.output(stage)
    path = output.path(max(output.manifest["files"], key=lambda file: file["bytes"])["path"])
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert run(config) == [stage]
    assert run.output(stage).digest == output.digest


def test_appended_documents_redo_the_last_chunks_only(run: Runner, config: PipelineConfig) -> None:
    run(config, until="encode")
    chunks = len(run.parts("count-chunk"))
    with Path(config.data.train[0]).open("a", encoding="utf-8") as file:
        file.writelines(demo_stories(3, seed=7))
    assert run(config, until="count") == ["ingest", "chunk", "count"]
    assert chunks > 3
    assert len(run.parts("count-chunk", made_in_last_run=True)) == 1


def test_a_source_that_is_gone_is_no_loss_while_what_it_made_is_there(
    run: Runner, config: PipelineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    run(config, until="merge")
    Path(config.data.train[0]).unlink()
    assert run(config, until="merge") == []
    assert "does not exist. What was made from it is used." in caplog.text
    with pytest.raises(UserError, match=r"train\.txt does not exist"):
        run(config, until="count", refresh=("count",))


def test_a_copied_and_a_moved_root_keep_everything(run: Runner, config: PipelineConfig, tmp_path: Path) -> None:
    run(config)
    shutil.copytree(run.root, tmp_path / "copy")
    run.root.rename(tmp_path / "moved")
    assert Runner(tmp_path / "copy")(config) == []
    assert Runner(tmp_path / "moved")(config) == []
    run.root = tmp_path / "elsewhere"
    assert run(config, until="chunk") == STAGES[:2], "Prefect's record of another root is no excuse"


def test_roots_and_thread_counts_do_not_change_the_bytes(config: PipelineConfig, tmp_path: Path) -> None:
    runs = [Runner(tmp_path / name) for name in ("one", "four")]
    for run, threads in zip(runs, (1, 4), strict=True):
        run(replace(config, execution=Execution(threads=threads, compile=False)), until="encode")
    for stage in ("merge", "encode"):
        one, four = (run.output(stage).manifest for run in runs)
        assert one["files"] == four["files"]
    shards = [[part.manifest["files"] for part in run.parts("encode-chunk")] for run in runs]
    assert shards[0] == shards[1]


def test_a_root_that_is_a_url(config: PipelineConfig) -> None:
    """As on an object store: what is uploaded is fetched again, and a second run finds it. In one thread: a file of
    fsspec's memory has one position for all that read it."""
    config = replace(config, execution=replace(config.execution, threads=1))
    first, second = (pipeline(config, "memory://pipeline-test") for _ in range(2))
    assert [stage["state"] for stage in first["stages"].values()] == ["made"] * 7
    assert [stage["state"] for stage in second["stages"].values()] == ["cached"] * 7


def test_without_validation_text(run: Runner, config: PipelineConfig) -> None:
    data = DataConfig(train=config.data.train, valid_fraction=0)
    assert run(replace(config, data=data)) == STAGES
    assert run.output("train").json("training.json")["valid_loss"] is None


def test_a_failed_training_goes_on_from_its_checkpoint(
    run: Runner, config: PipelineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = replace(config, train=replace(config.train, checkpoint_interval=2))

    def stop_after(steps: int) -> Callable[[Any], Any]:
        def save(self: Any) -> None:
            original(self)
            if self.step >= steps:
                raise RuntimeError("power cut")

        return save

    from lm.trainer import Trainer

    caplog.set_level(logging.INFO)
    original = Trainer._save
    monkeypatch.setattr(Trainer, "_save", stop_after(2))
    with pytest.raises(RuntimeError, match="power cut"):
        run(config)
    monkeypatch.undo()
    assert run(config) == ["train", "sample"]
    assert "Training resumes at step 2" in caplog.text


def test_training_in_processes_and_what_they_leave_is_adopted(
    run: Runner, config: PipelineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    config = replace(config, execution=replace(config.execution, processes=2, trackers=["tensorboard"]))
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    assert run(config)[-2:] == ["train", "sample"]
    output = run.output("train")
    boards = [file["path"] for file in output.manifest["records"] if file["path"].startswith("tensorboard/")]
    assert boards and output.is_intact()
    assert run(replace(config, execution=replace(config.execution, processes=1, trackers=[]))) == []
    # As a machine without Prefect would leave it: checkpoints and figures, and no manifest.
    digest = output.digest
    (Path(output.url).parent / "manifest.json").unlink()
    caplog.set_level(logging.INFO)
    assert run(config) == ["train"]
    assert run.output("train").digest == digest
    assert "Training resumes at step 4" in caplog.text


def test_ctrl_c_in_a_training_saves_what_it_has(
    run: Runner, config: PipelineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from lm.trainer import Trainer

    original = Trainer._train_step

    def step(self: Trainer, x: Any, y: Any, lr: float, is_asked: bool) -> Any:
        if self.step == 1:
            signal.raise_signal(signal.SIGINT)
        return original(self, x, y, lr, is_asked)

    monkeypatch.setattr(Trainer, "_train_step", step)
    with pytest.raises(KeyboardInterrupt):
        run(config)
    monkeypatch.undo()
    caplog.set_level(logging.INFO)
    assert run(config) == ["train", "sample"]
    assert "Training resumes at step 3" in caplog.text, "the step after the one it came in is finished"


def test_a_mistake_in_the_text_names_the_file_and_the_place(run: Runner, config: PipelineConfig) -> None:
    Path(config.data.valid[0]).write_bytes(b"fine \xff not")
    with pytest.raises(UserError, match=r"valid\.txt is not UTF-8: byte 0xff at offset 5"):
        run(config)
    assert run(replace(config, data=replace(config.data, invalid_utf8="replace")), until="ingest") == ["ingest"]
    assert run.output("ingest").json("texts.json")["statistics"]["valid"]["replaced"] == 1


def test_a_context_longer_than_the_text(run: Runner, config: PipelineConfig) -> None:
    long = replace(config, model=replace(config.model, context_length=100_000))
    with pytest.raises(UserError, match="too few for a context of 100,000"):
        run(long)


def test_shards_of_another_tokenizer_are_refused(run: Runner, config: PipelineConfig) -> None:
    from tasks.train import train

    run(config, until="encode")
    index = run.output("encode").ref
    run(replace(config, tokenizer=TokenizerConfig(vocab_size=280)), until="merge")
    other = run.output("merge").ref
    with pytest.raises(UserError, match="another tokenizer"):
        train.make(Run(str(run.root), "x"), train.named((index, [], [], other, config.model, config.train)))
