"""The command line: messages for user errors, and the commands on a finished run."""

import os
import re
import signal
import socket
import sqlite3
import subprocess
import threading
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from flows.config import PipelineConfig
from flows.prefect_support.deployments import is_server_healthy
from flows.prefect_support.signals import STOPPED_MESSAGE, Terminated
from lm.checkpoint.hugging_face.model_files import load_hugging_face
from lm.common.errors import UserError
from lm.inference.config import SampleConfig
from lm.inference.engine import generate
from lm.inference.generation_request import Generation
from lm.model.config import MoEConfig
from lm.text.demo_corpus import demo_stories
from tasks.runs.models import RunModel, resolve_model
from tests.helpers.deployed import TEXTMILL, own_environment
from tests.helpers.limits import TIMEOUT_SCALE
from textmill.cli import tools
from textmill.cli.main import main
from textmill.cli.parser import build_parser, parse

TINY = """\
data:
  train: ["{corpus}"]
  valid_fraction: 0.1
chunk: {{target_bytes: 16000}}
tokenizer: {{vocab_size: 300}}
model: {{context_length: 16, d_model: 16, num_layers: 1, num_heads: 2, d_ff: 32}}
train: {{steps: 2, batch_size: 2, warmup_steps: 1, eval_interval: 2, eval_sequences: 2, sample_tokens: 2}}
sample: {{prompts: [Once], max_new_tokens: 3}}
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("".join(demo_stories(100)), encoding="utf-8")
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY.format(corpus=corpus), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--preset", "tinystoris"], r"no preset 'tinystoris' \(did you mean 'tinystories'\?\)\. Presets: demo"),
        (["run", "--model.d_modle", "3"], r"no option --model\.d_modle.*did you mean '--model\.d_model'"),
        (["sample", "--tempratur", "3"], r"--tempratur.*did you mean '--temperature'"),
        (["run", "--train.steps", "many"], r"train\.steps"),
        (["run", "--train.optimizer", "adam"], r"train\.optimizer"),
        (["run", "--until", "trian"], r"no stage 'trian' \(did you mean 'train'"),
        (["run", "--until", "train,ingest"], "--until takes one stage"),
        (["run", "--until", "ingest", "--refresh", "merge,sample"], "refresh merge has no effect.*ends with ingest"),
        (["sweep", "--plan", "moe"], "Name the sweep first"),
        (["sweep"], r"sweep must be given\. See textmill sweep --help"),
        (["evaluate", "--task", "addition", "--model_name", "gpt"], "--model_name only works when --model is a URL"),
        (["serve", "--host", ""], "--host is empty"),
        (["run", "--refresh", "merge,encod"], r"no stage 'encod' \(did you mean 'encode'"),
        (["run", "--tokenizer.vocab_size", "256"], r"vocab_size 256 is too small"),
        (["run", "--tokenizer.special_tokens", "a", "a"], r"given twice"),
        (["run", "--tokenizer.special_tokens", "['<|endoftext|>', '']"], r"is empty"),
        (["run", "--data.separator", "<|end|>"], r"not among tokenizer\.special_tokens"),
        (["run", "--tokenizer.pattern", "(a"], r"not a regular expression"),
        (["run", "--model.num_heads", "7"], r"must be an even whole number"),
        (["run", "--sample.top_p", "2"], r"top_p"),
        (["plan", "--config", "/nowhere/x.yaml"], r"/nowhere/x\.yaml"),
        (["plan", "--data.train", "['/nowhere/x.txt']"], r"/nowhere/x\.txt does not exist"),
        (["plan", "--data.train", "['/nowhere/*.txt']"], r"No file matches /nowhere/\*\.txt"),
        (["plan", "--data.train", "['demo:none']"], r"names no demo corpus"),
        (["plan", "--config", "latin.yaml"], r"is not UTF-8"),
        (["plan", "--data.train", "['latin/*.txt']"], r"caf.xe9\.txt' is not UTF-8; rename it"),
        (["plan", "--refresh", "budget"], "There is no budget"),
        (["posttrain", "--plan", "--refresh", "ppo"], "There is no stage ppo"),
        (
            ["posttrain", "--sft.steps", "10", "--sft.warmup_steps", "11"],
            r"sft\.warmup_steps \d+ must be below sft\.steps 10, .* sft\.max_lr",
        ),
        (["posttrain", "--ppo.train.min_lr", "1"], r"ppo\.train\.min_lr 1.0 must not be above ppo\.train\.max_lr"),
        (["posttrain", "--reinforce.train.steps", "0"], r" reinforce\.train\.steps is 0; it must be at least 1"),
        (["sweep", "learning-rate", "--plan", "--refresh", "scaling_law"], "There is no stage scaling_law"),
        (["plan", "--root", ""], "--root is empty"),
        (["verify", "--root", "~nosuchuser/x"], r"The root '~nosuchuser/x' cannot be used"),
        (["run", "--root", os.fsdecode(b"caf\xe9")], r"The root 'caf.udce9' cannot be used"),
        (["plan", "--execution.train_deployment", "gpu-train"], r"train_deployment is 'gpu-train'.*pipeline/gpu-train"),
        (["rum"], r"There is no command 'rum' \(did you mean 'run'\?\)\. See textmill --help"),
        (["run", "--train.steps", "0"], r"train\.steps is 0; it must be at least 1"),
    ],
)
def test_a_user_error_prints_one_message(
    arguments: list[str],
    message: str,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("latin.yaml").write_bytes(b"name: caf\xe9")
    Path("latin").mkdir()
    Path("latin", os.fsdecode(b"caf\xe9.txt")).touch()
    assert main(arguments) == 2
    error = capfd.readouterr().err
    assert re.search(message, error, re.DOTALL), error
    assert error.startswith("textmill: ")
    assert "Traceback" not in error


def test_an_unknown_field_of_a_config_file_is_named(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("train:\n  stepps: 3\n")
    assert main(["plan", "--config", "mine.yaml"]) == 2
    assert re.search(r"train\.stepps.*did you mean '--train\.steps'", capfd.readouterr().err, re.DOTALL)


@pytest.mark.parametrize("command", ["plan --config mine.yaml", "sweep mine.yaml --plan"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {steps: 5, steps: 7}", "the key 'steps' is given twice"),
        ("train: {yes: 7}", "the key True is not text"),
        ("- a", "mine.yaml"),
    ],
)
def test_a_mistake_in_a_yaml_file_names_the_file(
    command: str, text: str, message: str, capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(text)
    assert main(command.split()) == 2
    error = capfd.readouterr().err
    assert message in error and "mine.yaml" in error


@pytest.mark.parametrize(
    "items",
    [
        ["[END]"],
        ["[1].txt"],
        ["[WP] a, b"],
        ["a.txt"],
        ["a b.txt", "c: d"],
        ["\U0001f600 #1", "-1", "null"],
        ['"q\'"', "a=b"],
    ],
)
def test_the_items_of_a_list_follow_its_option(items: list[str]) -> None:
    for arguments in (["--data.train", *items], [f"--data.train={items[0]}", *items[1:]]):
        parsed = parse(
            build_parser(only="plan"),
            ["plan", "--root", "r", *arguments, "--data.valid", "['v', \"w\"]", "--budget", "5m"],
        )
        assert parsed.plan.data.train == items
        assert parsed.plan.data.valid == ["v", "w"] and parsed.plan.budget == "5m"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--data.train", "a", "--data.train", "b"],
        ["--data.train=a", "--root", "r", "--data.train=['b']"],
        ["--train.sample-prompts", "a", "b", "--train.sample_prompts=c"],
    ],
)
def test_a_list_that_is_given_twice_is_refused(arguments: list[str]) -> None:
    with pytest.raises(UserError, match=r"is given twice; name all its values after it once: --\S+ A B"):
        parse(build_parser(only="plan"), ["plan", *arguments])


def test_an_option_may_have_dashes() -> None:
    arguments = ["--max-batch-size", "3", "--prefix_cache_mb=4", "--speculative-tokens=5"]
    serve = parse(build_parser(), ["serve", *arguments]).serve
    assert (serve.max_batch_size, serve.prefix_cache_mb, serve.speculative_tokens) == (3, 4, 5)
    prompts = parse(build_parser(), ["sample", "--max-new-tokens", "6", "--prompt", "a-b"]).sample
    assert (prompts.max_new_tokens, prompts.prompt) == (6, ["a-b"])


def test_the_last_of_two_presets_wins(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data = f"--data.train=['{tmp_path}/none.txt']"
    assert main(["plan", "--preset", "owt", "--root", str(tmp_path), data, "--preset=demo"]) == 2
    assert "none.txt does not exist" in capfd.readouterr().err


@pytest.mark.parametrize("answer", [b"SSH-2.0-x\r\n", b"HTTP/1.0 200 OK\r\n\r\n<html></html>"])
def test_another_service_at_the_port_is_not_a_healthy_server(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def respond() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(answer)

        thread = threading.Thread(target=respond)
        thread.start()
        assert not is_server_healthy(f"http://127.0.0.1:{listener.getsockname()[1]}")
        thread.join()


@pytest.mark.parametrize("command", [["sample"], ["chat"], ["serve"], ["export", "exported"]], ids=" ".join)
def test_a_command_that_needs_a_model_fails_without_one(
    command: list[str], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([*command, "--root", str(tmp_path)]) == 2
    assert "has no finished model" in capfd.readouterr().err
    assert main([*command, "--root", str(tmp_path), "--model", "nothing"]) == 2
    assert "There is no model 'nothing'" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("interrupt", "code"), [(KeyboardInterrupt(), 130), (Terminated(), 143), (Terminated(signal.SIGHUP), 129)], ids=repr
)
def test_an_interrupt_in_the_error_of_a_library_counts_as_stopped(
    interrupt: BaseException,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def verify(options: Any) -> int:
        raise BaseExceptionGroup("unhandled errors in a TaskGroup", [interrupt])

    monkeypatch.setattr(tools, "verify_command", verify)
    assert main(["verify"]) == code
    assert capfd.readouterr().err == f"{STOPPED_MESSAGE}\n"
    monkeypatch.setattr(tools, "export_command", verify)
    assert main(["export", str(tmp_path)]) == code
    assert capfd.readouterr().err == "textmill: stopped.\n", "an export keeps nothing"


@pytest.mark.slow
def test_every_preset_is_valid() -> None:
    for path in PipelineConfig.PRESETS.glob("*.yaml"):
        parser = build_parser(path.stem)
        options = parser.instantiate(parser.parse_args(["run"]))["run"]
        sections = {name: options[name] for name in PipelineConfig.__dataclass_fields__}
        assert PipelineConfig(**sections).model.d_model > 0
    assert PipelineConfig.preset_path("demo").exists()


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert version("textmill") in capsys.readouterr().out


def check_export(exported: Path, root: Path) -> None:
    """Check that the weights are equal bit for bit, and that transformers generates the same tokens."""
    best, tokenizer = resolve_model("", str(root)).load("cpu")
    loaded = load_hugging_face(exported)
    assert all(torch.equal(weight, loaded.state_dict()[name]) for name, weight in best.state_dict().items())
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    prompt = tokenizer.encode("Once upon", allowed_special=())
    max_new_tokens = best.config.context_length - len(prompt)
    generation = Generation(
        prompt, max_new_tokens, SampleConfig(temperature=0), frozenset(tokenizer.special_ids.values())
    )
    generate(best, [generation])
    model = transformers.AutoModelForCausalLM.from_pretrained(exported)
    ids = model.generate(torch.tensor([prompt]), max_new_tokens=len(generation.ids), do_sample=False, pad_token_id=0)
    assert ids[0].tolist() == [*prompt, *generation.ids]
    assert transformers.AutoTokenizer.from_pretrained(exported)("Once upon")["input_ids"] == prompt


def check_card(card: str, root: Path) -> None:
    """Check that the model card tells results, data with digests and configuration, and no place on this machine."""
    model = resolve_model("", str(root))
    assert isinstance(model, RunModel)
    figures = model.model.manifest["figures"]
    assert f"- valid loss {figures['valid_loss']:.3f}" in card
    for output in (model.model, model.tokenizer):
        assert f"| {output.ref.stage} | `{output.digest}` |" in card
    assert re.search(r"^\| ingest \| `[0-9a-f]{64}` \|$", card, re.MULTILINE)
    assert '| train | `["corpus.txt"]` |' in card
    assert "| model.d_model | `16` |" in card and "| config.steps | `2` |" in card
    assert str(root.parent) not in card


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
def test_run_plan_sample(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    root = tiny.parent / "root"
    common = ["--config", str(tiny), "--root", str(root)]
    assert main(["plan", *common]) == 0
    assert "ingest-train  runs, 1 group" in capfd.readouterr().out
    assert main(["run", *common]) == 0
    out, err = capfd.readouterr()
    assert re.search(r"^train +made", out, re.MULTILINE)
    assert "> Once|" in out
    assert f"textmill sample --root {root}" in out
    assert "Running merge." in err
    assert main(["run", *common, "--until", "merge"]) == 0
    assert re.search(r"^merge +cached", capfd.readouterr().out, re.MULTILINE)
    assert main(["sample", "--root", str(root), "--prompt", "Once <|endoftext|>", "--max_new_tokens", "2"]) == 0
    assert "> Once <|endoftext|>|" in capfd.readouterr().out
    exported = tiny.parent / "exported"
    assert main(["export", str(exported), "--root", str(root)]) == 0
    check_export(exported, root)
    check_card((exported / "README.md").read_text(encoding="utf-8"), root)
    assert main(["export", str(exported), "--root", str(root)]) == 2
    assert "already exists" in capfd.readouterr().err


def run_in_process(tiny: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``textmill run`` in its own process, with its own Prefect home."""
    return subprocess.run(
        [*TEXTMILL, "run", "--config", str(tiny), "--root", str(tiny.parent / "root")],
        capture_output=True,
        text=True,
        env=os.environ | own_environment(tiny.parent) | environment,
        timeout=300 * TIMEOUT_SCALE,
        check=False,
    )


@pytest.mark.slow
def test_a_user_error_during_a_run_prints_no_traceback(tiny: Path) -> None:
    (tiny.parent / "corpus.txt").write_bytes(b"fine so far \xff and on")
    done = run_in_process(tiny)
    assert done.returncode == 2, done.stderr
    assert "corpus.txt is not UTF-8: byte 0xff at offset 12" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_an_unreachable_server_is_named(tiny: Path) -> None:
    done = run_in_process(tiny, PREFECT_API_URL="http://127.0.0.1:9/api")
    assert done.returncode == 2, done.stderr
    assert "textmill: Prefect's server at http://127.0.0.1:9/api cannot be reached" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_temporary_server_that_does_not_start_is_named(tiny: Path) -> None:
    done = run_in_process(tiny, PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS="0")
    assert done.returncode == 2, done.stderr
    assert "textmill: Prefect's temporary server did not start in 0 s. Run the same command again" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_newer", "reason"), [(True, "Can't locate revision identified by 'ffffffffffff'"), (False, "not a database")]
)
def test_a_temporary_server_that_cannot_use_its_database_gives_the_reason(
    tiny: Path, is_newer: bool, reason: str
) -> None:
    database = tiny.parent / "prefect" / "prefect.db"
    database.parent.mkdir()
    if is_newer:
        with closing(sqlite3.connect(database)) as connection, connection:
            connection.execute("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)")
            connection.execute("INSERT INTO alembic_version VALUES ('ffffffffffff')")
    else:
        database.write_bytes(b"no database " * 1000)
    done = run_in_process(tiny, PREFECT_SERVER_LOGGING_LEVEL="CRITICAL")
    assert done.returncode == 2, done.stderr
    assert re.search(rf"textmill: Prefect's temporary server ended at its start: .*{reason}", done.stderr), done.stderr
    assert f"in {database.parent}. If another version of Prefect made the database" in done.stderr
    assert "Traceback" not in done.stderr


def test_options_of_experts_are_read_and_no_other_class_is(tmp_path: Path) -> None:
    file = tmp_path / "experts.yaml"
    file.write_text("model:\n  moe:\n    num_experts: 16\n    affinity: sigmoid\n", encoding="utf-8")
    parser = build_parser()
    moe = parser.instantiate(
        parser.parse_args(["plan", "--config", str(file), "--model.moe.top_k", "3"])
    ).plan.model.moe
    assert moe == MoEConfig(num_experts=16, top_k=3, affinity="sigmoid")
    for value in ("os.system", "lm.model.config.ModelConfig"):
        with pytest.raises(UserError, match=r"model\.moe"):
            parser.parse_args(["plan", "--model.moe.class_path", value])
