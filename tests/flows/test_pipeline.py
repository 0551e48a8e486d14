"""The whole pipeline under Prefect: which stages are cached, which run again, and with which outputs."""

import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flows.config import PipelineConfig
from flows.pipeline import pipeline, pipeline_stages
from flows.plan import Executor, UntilReached, plan
from lm.common.errors import UserError
from lm.inference.config import SampleConfig
from lm.text.character_tables import tables_identity
from lm.text.config import DataConfig
from lm.text.demo_corpus import demo_stories
from lm.tokenizer.config import TokenizerConfig
from tasks.runtime.execution import Execution
from tasks.runtime.output import Ref
from tasks.runtime.run_context import RunContext
from tasks.runtime.stage import Stage
from tests.helpers.pipelines import STAGES, Runner

pytestmark = pytest.mark.usefixtures("prefect_server")


def test_a_second_run_is_all_cached_and_execution_changes_nothing(run: Runner, config: PipelineConfig) -> None:
    assert run(config) == STAGES
    assert len(run.groups("count-group")) > 3
    assert run(config) == []
    assert run(replace(config, execution=Execution(threads=1, log_interval=3, compile=False))) == []
    assert {action.split(",")[0] for _, action in plan(pipeline_stages, config, str(run.root), None, ())} == {"cached"}


def test_the_plan_of_a_new_root_has_all_stages_up_to_the_last_one(config: PipelineConfig, tmp_path: Path) -> None:
    rows = plan(pipeline_stages, config, str(tmp_path / "root"), None, ())
    assert [name for name, _ in rows] == ["ingest-train", "ingest-valid", *STAGES]
    assert rows[0][1] == "runs, 1 group"
    depends = dict(zip(STAGES[1:], STAGES, strict=False))
    assert dict(rows[3:]) == {name: f"runs if the content of {before} changes" for name, before in depends.items()}
    assert plan(pipeline_stages, config, str(tmp_path / "root"), "count", ()) == rows[:5]


@pytest.mark.slow
def test_a_change_reruns_the_stages_that_depend_on_it(run: Runner, config: PipelineConfig) -> None:
    run(config)
    assert run(replace(config, sample=SampleConfig(prompts=["One"], max_new_tokens=3))) == ["sample"]
    longer = replace(config, train=replace(config.train, steps=5))
    rows = dict(plan(pipeline_stages, longer, str(run.root), None, ()))
    assert rows["encode"] == "cached"
    assert rows["train"] == "runs: steps 4 → 5"
    assert rows["sample"] == "runs if the content of train changes"
    assert run(longer) == ["train", "sample"]
    smaller = replace(config, tokenizer=TokenizerConfig(vocab_size=290))
    assert run(smaller) == ["merge", "encode", "train", "sample"]
    assert not run.groups("count-group", made_in_last_run=True)


def test_character_tables_and_the_version_of_jieba_enter_the_keys_of_what_they_decide(
    config: PipelineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Calls(Executor):
        """Runs nothing, and notes the arguments of mapped stages."""

        def call(self, stage: Stage, *arguments: Any, title: str = "") -> Ref:
            return Ref(stage.name, "")

        def read(self, function: Any, *arguments: Any) -> Any:
            return [Ref("groups", "")]

        def map(self, stage: Stage, title: str, items: Any, *arguments: Any) -> list[Ref]:
            bound[title] = stage.bind(None, *arguments)
            return [Ref(stage.name, "")]

    monkeypatch.setattr("flows.pipeline.jieba_version", lambda: "0.42")
    run = RunContext(str(tmp_path / "root"), "")
    for pattern, version in (("gpt2", None), ("jieba", "0.42")):
        bound = dict[str, Any]()
        changed = replace(config, tokenizer=TokenizerConfig(vocab_size=300, pattern=pattern))
        with suppress(UntilReached):
            pipeline_stages(changed, Calls(run, changed, "encode"))
        assert [bound[title].get("jieba") for title in ("count", "encode-train", "encode-valid")] == [version] * 3
        identity = tables_identity(pattern)
        assert [bound[title]["tables"] for title in ("count", "encode-train", "encode-valid")] == [identity] * 3


@pytest.mark.slow
def test_until_stops_and_refresh_reruns(run: Runner, config: PipelineConfig) -> None:
    assert run(config, until="merge") == STAGES[:4]
    assert run(config) == STAGES[4:]
    before = run.output("merge")
    assert run(config, refresh=("merge",)) == ["merge"], "the content is the same, so later stages stay cached"
    assert run.output("merge").manifest["attempt"] != before.manifest["attempt"]
    assert run.output("merge").digest == before.digest
    assert run(config, until="count", refresh=("count",)) == ["count"]
    assert len(run.groups("count-group", made_in_last_run=True)) == len(run.groups("count-group"))


@pytest.mark.slow
def test_a_deleted_shard_is_the_only_one_made_again(run: Runner, config: PipelineConfig) -> None:
    run(config, until="encode")
    shard = run.groups("encode-group")[1]
    content = shard.path("tokens.bin").read_bytes()
    shard.path("tokens.bin").unlink()
    assert run(config, until="encode") == []
    (made,) = run.groups("encode-group", made_in_last_run=True)
    assert made.ref == shard.ref
    assert made.path("tokens.bin").read_bytes() == content


@pytest.mark.slow
def test_a_flipped_byte_is_detected_and_repaired(run: Runner, config: PipelineConfig) -> None:
    run(config)
    for stage in STAGES:
        output = run.output(stage)
        path = output.path(max(output.manifest["files"], key=lambda file: file["bytes"])["path"])
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        assert run(config) == [stage]
        assert run.output(stage).digest == output.digest


@pytest.mark.slow
def test_appended_documents_change_only_the_last_group(run: Runner, config: PipelineConfig) -> None:
    run(config, until="encode")
    chunks = len(run.groups("count-group"))
    with Path(config.data.train[0]).open("a", encoding="utf-8") as file:
        file.writelines(demo_stories(3, seed=7))
    assert run(config, until="count") == ["ingest", "chunk", "count"]
    assert chunks > 3
    assert len(run.groups("count-group", made_in_last_run=True)) == 1


@pytest.mark.slow
def test_a_deleted_source_is_not_needed_while_its_outputs_exist(
    run: Runner, config: PipelineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    run(config, until="merge")
    Path(config.data.train[0]).unlink()
    assert run(config, until="merge") == []
    assert "does not exist. The outputs made from it are used." in caplog.text
    with pytest.raises(UserError, match=r"train\.txt does not exist"):
        run(config, until="count", refresh=("count",))


@pytest.mark.slow
def test_a_copied_and_a_moved_root_stay_cached(run: Runner, config: PipelineConfig, tmp_path: Path) -> None:
    run(config)
    shutil.copytree(run.root, tmp_path / "copy")
    run.root.rename(tmp_path / "moved")
    assert Runner(tmp_path / "copy")(config) == []
    assert Runner(tmp_path / "moved")(config) == []
    run.root = tmp_path / "elsewhere"
    assert run(config, until="chunk") == STAGES[:2], "Prefect's records of another root have no effect"


@pytest.mark.slow
def test_root_and_thread_count_do_not_change_the_files(config: PipelineConfig, tmp_path: Path) -> None:
    runs = [Runner(tmp_path / name) for name in ("one", "four")]
    for run, threads in zip(runs, (1, 4), strict=True):
        run(replace(config, execution=Execution(threads=threads, compile=False)), until="encode")
    for stage in ("merge", "encode"):
        one, four = (run.output(stage).manifest for run in runs)
        assert one["files"] == four["files"]
    shards = [[group.manifest["files"] for group in run.groups("encode-group")] for run in runs]
    assert shards[0] == shards[1]


@pytest.mark.slow
def test_a_root_that_is_a_url(config: PipelineConfig) -> None:
    """Outputs are uploaded and fetched again, as with an object store.

    This uses one thread, because all readers of a file in fsspec's memory file system share its position.
    """
    config = replace(config, execution=replace(config.execution, threads=1))
    first, second = (pipeline(config, "memory://pipeline-test") for _ in range(2))
    assert [stage["state"] for stage in first["stages"].values()] == ["made"] * 7
    assert [stage["state"] for stage in second["stages"].values()] == ["cached"] * 7


@pytest.mark.slow
def test_without_validation_text(run: Runner, config: PipelineConfig) -> None:
    data = DataConfig(train=config.data.train, valid_fraction=0)
    assert run(replace(config, data=data)) == STAGES
    assert run.output("train").json("training.json")["valid_loss"] is None


def test_invalid_utf8_is_reported_with_file_and_offset(run: Runner, config: PipelineConfig) -> None:
    Path(config.data.valid[0]).write_bytes(b"fine \xff not")
    with pytest.raises(UserError, match=r"valid\.txt is not UTF-8: byte 0xff at offset 5"):
        run(config)
    assert run(replace(config, data=replace(config.data, invalid_utf8="replace")), until="ingest") == ["ingest"]
    assert run.output("ingest").json("text_groups.json")["statistics"]["valid"]["replaced"] == 1


def test_a_context_longer_than_the_text_is_refused(run: Runner, config: PipelineConfig) -> None:
    long = replace(config, model=replace(config.model, context_length=100_000))
    with pytest.raises(UserError, match="too few for a context of 100,000"):
        run(long)


@pytest.mark.slow
def test_shards_of_another_tokenizer_are_refused(run: Runner, config: PipelineConfig) -> None:
    from tasks.train import train

    run(config, until="encode")
    index = run.output("encode").ref
    run(replace(config, tokenizer=TokenizerConfig(vocab_size=280)), until="merge")
    other = run.output("merge").ref
    with pytest.raises(UserError, match="another tokenizer"):
        train.materialize(RunContext(str(run.root), "x"), train.bind(index, [], [], other, config.model, config.train))
