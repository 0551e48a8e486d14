"""The model that --model names: of runs of both flows, and of directories."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from lm.checkpoint.hugging_face.model_files import load_hugging_face, save_hugging_face
from lm.checkpoint.training_checkpoint import save_training
from lm.common.errors import UserError
from lm.data.chat_template import add_chat_tokens
from lm.inference.completion import complete
from lm.inference.config import Quantization, SampleConfig
from lm.inference.runners.runner import prepare_for_inference
from lm.model.transformer import TransformerLM
from lm.text.pretokenize import END_OF_TEXT
from tasks.runs.models import DirectoryModel, RunModel, resolve_model
from tasks.runtime.output import Ref
from tasks.runtime.run_context import Attempt, RunContext
from tasks.runtime.stage import stage
from tests.helpers.generating import make_model
from tests.helpers.llamas import GROUPED, assert_same_weights, meta_weights, train_small_llama_tokenizer, write_meta
from tests.helpers.roots import materialize, run_context, write_run_record
from tests.helpers.tokenizers import bytes_tokenizer, make_tokenizer
from textmill.cli.main import main

PLAIN = bytes_tokenizer([END_OF_TEXT])
CHAT = add_chat_tokens(PLAIN)
PRETRAINED, POSTTRAINED = "20260101-000000-full-story", "20260102-000000-reinforce-chat"


def make_trained(vocab_size: int, seed: int) -> TransformerLM:
    model = make_model(vocab_size, 64)
    torch.manual_seed(seed)
    with torch.no_grad():
        model.head_weight.normal_()
    return model.eval()


def _write_training(out: Attempt, vocab_size: int, seed: int) -> None:
    save_training(out.directory / "checkpoints" / "step-0000001", make_trained(vocab_size, seed), [], 1, {})
    (out.directory / "training.json").write_text(json.dumps({"best": "checkpoints/step-0000001"}))


@stage("merge")
def merge(out: Attempt) -> None:
    PLAIN.save(out.directory / "tokenizer")


@stage("train")
def train(out: Attempt) -> None:
    _write_training(out, 257, 0)


@stage("base")
def base(out: Attempt) -> None:
    CHAT.save(out.directory / "tokenizer")
    _write_training(out, 261, 1)


@stage("sft")
def sft(out: Attempt) -> None:
    _write_training(out, 261, 2)


@stage("preference")
def preference(out: Attempt) -> None:
    _write_training(out, 261, 3)


@stage("reinforce")
def reinforce(out: Attempt) -> None:
    _write_training(out, 261, 4)


@stage("ppo")
def ppo(out: Attempt) -> None:
    _write_training(out, 261, 5)


STAGES = {stage.name: stage for stage in (merge, train, base, sft, preference, reinforce, ppo)}
EXPECTED = {"train": make_trained(257, 0), "sft": make_trained(261, 2), "preference": make_trained(261, 3)}
EXPECTED |= {"reinforce": make_trained(261, 4), "ppo": make_trained(261, 5)}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunContext, dict[str, Ref]]:
    """A root with the outputs of all stages, and without run records."""
    run = run_context(tmp_path_factory.mktemp("models") / "root")
    return run, {name: materialize(stage, run) for name, stage in STAGES.items()}


@pytest.fixture
def root(made: tuple[RunContext, dict[str, Ref]]) -> RunContext:
    """The root with a run of each flow, the post-training the later one."""
    run, refs = made
    for name in run.store.list_names("runs"):
        run.store.delete_file("runs", name)
    write_run_record(run, PRETRAINED, refs["merge"], refs["train"])
    write_run_record(run, POSTTRAINED, *(refs[name] for name in ("base", "sft", "preference", "reinforce")))
    write_run_record(run, "latest", refs["merge"], refs["train"])
    return run


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        (("merge", "train"), "train"),
        (("base", "sft"), "sft"),
        (("base", "sft", "preference"), "preference"),
        (("base", "sft", "reinforce"), "reinforce"),
        (("base", "sft", "preference", "reinforce"), "reinforce"),
        (("base", "preference"), "preference"),
        (("base", "reinforce"), "reinforce"),
        (("base", "sft", "reinforce", "ppo"), "ppo"),
    ],
    ids=str,
)
def test_the_result_of_a_run_is_its_last_training(
    made: tuple[RunContext, dict[str, Ref]], root: RunContext, stages: tuple[str, ...], expected: str
) -> None:
    _, refs = made
    write_run_record(root, "20260103-000000-full-x", *(refs[name] for name in stages))
    for name in ("", "20260103-000000-full-x"):
        resolved = resolve_model(name, root.root)
        assert isinstance(resolved, RunModel) and resolved.name == "20260103-000000-full-x"
        assert (resolved.model.ref, resolved.tokenizer.ref) == (refs[expected], refs[stages[0]])
        assert resolved.public_name == "x" and resolved.is_post_trained == (expected != "train")
    model, tokenizer = resolved.load("cpu")
    assert_same_weights(model, EXPECTED[expected])
    assert tokenizer.special_ids == (PLAIN if expected == "train" else CHAT).special_ids


def test_the_latest_run_with_a_model(
    made: tuple[RunContext, dict[str, Ref]], root: RunContext, caplog: pytest.LogCaptureFixture
) -> None:
    _, refs = made
    write_run_record(root, "20260103-000000-base-x", refs["base"])
    write_run_record(root, "20260104-000000-merge-x", refs["merge"])
    root.store.write_text("{}", "runs", "20260105-000000-full-x.json")
    assert resolve_model("", root.root).name == POSTTRAINED
    assert "20260105-000000-full-x.json is damaged and is skipped" in caplog.text
    assert resolve_model(PRETRAINED, root.root).name == PRETRAINED


def test_names_that_are_no_model(made: tuple[RunContext, dict[str, Ref]], root: RunContext, tmp_path: Path) -> None:
    _, refs = made
    write_run_record(root, "20260103-000000-base-x", refs["base"])
    root.store.write_text("{}", "runs", "20260105-000000-full-x.json")
    missing = Ref("train", "0" * 64)
    write_run_record(root, "20260106-000000-full-x", refs["merge"], missing)
    (tmp_path / "file").touch()
    for name, message in {
        PRETRAINED[:-1]: rf"no model '{PRETRAINED[:-1]}' \(did you mean '{PRETRAINED}'\?\): neither a run below",
        "latest": "There is no model 'latest'",
        f"../runs/{PRETRAINED}": r"There is no model '\.\./runs",
        "20260103-000000-base-x": "trained no model; its stages are: base",
        "20260105-000000-full-x": r"runs/20260105-000000-full-x\.json is damaged",
        "20260106-000000-full-x": "has no manifest of a finished train",
        str(tmp_path / "file"): "There is no model .*: this is a file; name the directory",
        "org/model-1.5B": "textmill does not download models.*run hf download org/model-1.5B first",
        "other_org/name": "hf download other_org/name first",
        "~no-such-user/model": "cannot be opened",
    }.items():
        with pytest.raises(UserError, match=message):
            resolve_model(name, root.root)
    with pytest.raises(UserError, match=r"has no finished model; make one with: textmill run --root '.*/no runs'$"):
        resolve_model("", str(tmp_path / "no runs"))


def test_clients_learn_the_name_of_a_directory_and_not_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "my-llama"
    save_hugging_face(make_model(257, 16), PLAIN, directory)
    monkeypatch.chdir(directory)
    for name in (str(directory), ".", "../my-llama", "../my-llama/"):
        assert resolve_model(name, str(tmp_path / "root")).public_name == "my-llama"
    assert not resolve_model(".", str(tmp_path)).is_post_trained
    Path("chat_template.jinja").write_text("{{ messages }}")
    assert resolve_model(".", str(tmp_path)).is_post_trained, "it has a template of its own"


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    run = run_context(tmp_path / "root")
    write_run_record(run, "20260101-000000-full-x", materialize(merge, run), materialize(train, run))
    resolved = resolve_model("", run.root)
    [weights] = Path(run.root).glob("train/*/*/checkpoints/*/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(UserError, match="damaged"):
        resolved.load("cpu")


def test_too_little_memory_for_the_weights_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_hugging_face(make_trained(257, 5), PLAIN, tmp_path / "model")
    resolved = resolve_model(str(tmp_path / "model"), str(tmp_path / "root"))
    monkeypatch.setattr("lm.inference.runners.runner.prepare_for_inference", lambda *_, **__: torch.empty(1 << 60))
    with pytest.raises(UserError, match=r"The model .* does not fit into memory; use a smaller one"):
        resolved.load_for_inference("cpu")
    monkeypatch.setattr("lm.checkpoint.external.load_external", lambda *_: torch.empty(1 << 60))
    with pytest.raises(UserError, match=r"The model .* does not fit into memory; use a smaller one"):
        resolved.load("cpu")


def test_a_run_comes_before_a_directory_of_its_name(
    root: RunContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_hugging_face(make_trained(300, 5), PLAIN, tmp_path / PRETRAINED)
    assert isinstance(resolve_model(PRETRAINED, root.root), RunModel)
    resolved = resolve_model(f"./{PRETRAINED}", root.root)
    assert isinstance(resolved, DirectoryModel) and resolved.name == PRETRAINED
    model, tokenizer = resolved.load("cpu")
    assert model.config.vocab_size == tokenizer.size == 257, "the padding of the vocabulary is removed"


def test_a_directory_without_a_model(tmp_path: Path) -> None:
    resolved = resolve_model(str(tmp_path), str(tmp_path / "root"))
    assert not (tmp_path / "root").exists()
    with pytest.raises(UserError, match=r"is no checkpoint: .*params\.json.*config\.json"):
        resolved.load("cpu")


@pytest.mark.slow
def test_the_commands_take_any_model(root: RunContext, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The result of a post-training is exported, and the exported directory is sampled and exported again."""
    options = ["--root", root.root, "--model"]
    exported, again = tmp_path / "exported", tmp_path / "again"
    assert main(["export", str(exported), *options, POSTTRAINED]) == 0
    assert main(["export", str(again), *options, str(exported)]) == 0
    assert_same_weights(load_hugging_face(again), EXPECTED["reinforce"])
    assert (again / "tokenizer_config.json").read_bytes() == (exported / "tokenizer_config.json").read_bytes()
    assert "chat_template" in json.loads((again / "tokenizer_config.json").read_text())
    config = SampleConfig(prompts=["Once"], max_new_tokens=9, temperature=0)
    expected = complete(make_trained(261, 4), CHAT, config)[0].text
    quantizations: list[Quantization] = ["bfloat16", "int8"]
    rounded = [
        complete(prepare_for_inference(make_trained(261, 4), quantization=quantization), CHAT, config)[0].text
        for quantization in quantizations
    ]
    for name in (POSTTRAINED, str(exported)):
        arguments = ["--prompt", "Once", "--max_new_tokens", "9", "--temperature", "0", "--device", "cpu"]
        for quantization, text in zip(quantizations, rounded, strict=True):
            assert main(["sample", *options, name, *arguments, "--quantize", quantization]) == 0
            assert f"> Once|{text}\n" in capsys.readouterr().out
        for more in ([], ["--speculative_tokens", "3"]):
            assert main(["sample", *options, name, *arguments, *more]) == 0
            assert f"> Once|{expected}\n" in capsys.readouterr().out


@pytest.mark.parametrize("name", [PRETRAINED, POSTTRAINED])
def test_the_context_and_the_tokenizer_of_a_run_are_read_without_its_weights(
    root: RunContext, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "x" * 999, "response": "a"}))
    resolved = resolve_model(name, root.root)
    assert resolved.read_context_length() == EXPECTED["reinforce"].config.context_length
    arguments = ["--show", str(tmp_path / "a.jsonl"), "--model", name, "--root", root.root]
    assert main(["dialogs", *arguments]) == 0
    context = f"no answer within the model's context of {resolved.read_context_length()} tokens"
    assert f"tokens, 2 trained; left out: {context}" in capsys.readouterr().out


def test_sentencepiece_is_sampled_and_not_exported(
    root: RunContext, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    params = GROUPED | {"vocab_size": 320}
    directory = write_meta(tmp_path / "meta", params, meta_weights(params))
    train_small_llama_tokenizer(directory / "tokenizer.model")
    options = ["--root", root.root, "--model", str(directory)]
    assert main(["sample", *options, "--prompt", "the cat", "--max_new_tokens", "3", "--device", "cpu"]) == 0
    assert "> the cat|" in capsys.readouterr().out
    for arguments in ([], ["--gguf", "q8_0"]):
        assert main(["export", str(tmp_path / "out"), *options, *arguments]) == 2
        assert "meta has a SentencePiece tokenizer" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


def test_a_model_is_exported_for_llama_cpp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    tokenizer = make_tokenizer(special_tokens=[END_OF_TEXT], merges=63)
    model = make_model(tokenizer.size, 64, d_model=32, d_ff=64)
    save_hugging_face(model, tokenizer, tmp_path / "model")
    path = tmp_path / "model.gguf"
    options = ["--root", str(tmp_path / "root"), "--model", str(tmp_path / "model"), "--gguf", "q8_0"]
    assert main(["export", str(path), *options]) == 0
    shown = capsys.readouterr()
    assert shown.out == f"Exported to {path}. llama.cpp can load it.\n"
    [head] = [tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == "output.weight"]
    assert head.tensor_type.name == "Q8_0"
    weights = gguf.dequantize(np.array(head.data), head.tensor_type)
    torch.testing.assert_close(torch.from_numpy(weights), model.head_weight.detach(), rtol=0, atol=0.01)
    assert main(["export", str(path), *options]) == 2
    assert "already exists; name a new file" in capsys.readouterr().err


@pytest.mark.parametrize("format_options", [[], ["--gguf", "float32"]], ids=["directory", "gguf"])
def test_an_export_keeps_the_template_and_the_settings_of_a_directory(
    tmp_path: Path, format_options: list[str]
) -> None:
    gguf = pytest.importorskip("gguf", reason="gguf is not installed") if format_options else None
    tokenizer, directory = make_tokenizer(special_tokens=[END_OF_TEXT], merges=63), tmp_path / "model"
    save_hugging_face(make_model(tokenizer.size, 64, d_model=32, d_ff=64), tokenizer, directory)
    template = "{% for m in messages %}{{ m.content }}<|endoftext|>{% endfor %}"
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    (directory / "generation_config.json").write_text('{"temperature": 0.6}', encoding="utf-8")
    options = ["--root", str(tmp_path / "root"), "--model", str(directory), *format_options]
    assert main(["export", str(tmp_path / "out"), *options]) == 0
    if gguf:
        field = gguf.GGUFReader(tmp_path / "out").fields["tokenizer.chat_template"]
        assert field.contents() == template
        return
    about = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert about["chat_template"] == template and generation["temperature"] == 0.6


def test_a_model_is_not_exported_for_llama_cpp(
    root: RunContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["export", str(tmp_path / "model.gguf"), "--gguf", "float32", "--root", root.root]
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert main(command) == 2
    assert "needs the gguf library: pip install 'textmill[gguf]'" in capsys.readouterr().err
    monkeypatch.undo()
    pytest.importorskip("gguf", reason="gguf is not installed")
    assert main(command) == 2
    assert "GGUF requires merges, and the tokenizer has no merges." in capsys.readouterr().err
    assert not (tmp_path / "model.gguf").exists()
