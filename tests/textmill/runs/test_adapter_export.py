"""Exports of adapters: peft's form with a directory of the base, the whole model, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flows.posttrain import PosttrainConfig, posttrain
from lm.checkpoint.external import load_any_model
from lm.checkpoint.hugging_face.model_files import load_hugging_face, save_hugging_face
from lm.model.config import AdapterConfig, ModelConfig
from lm.model.transformer import TransformerLM
from lm.posttrain.config import ComparisonConfig, DialogsConfig, DPOConfig
from tasks.runs.models import resolve_model
from tasks.runtime.execution import Execution
from tests.helpers.posttraining import PAIRS, quick_config
from tests.helpers.published_chat import save_qwen
from tests.helpers.tokenizers import bytes_tokenizer
from textmill.cli.main import main

pytestmark = pytest.mark.usefixtures("prefect_server")

IDS = torch.arange(30).view(2, 15)
ROWS = 257  # of the head; the files may pad it


def train_adapters(directory: Path, base: Path, **options: Any) -> str:
    """Train an adapter, and a second one on it, below the root ``directory / "root"``; return the root."""
    rows = [{"prompt": p.prompt[0]["content"], "chosen": p.chosen, "rejected": p.rejected} for p in PAIRS]
    (directory / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train = quick_config(steps=3, sample_prompts=["1 + 1 ="])
    config = PosttrainConfig(
        base=str(base),
        methods=["sft", "preference"],
        dialogs=DialogsConfig(
            train=[str(directory / "pairs.jsonl")], task="addition:1-1", train_problems=40, test_problems=4
        ),
        sft=train,
        preference=DPOConfig(train=train),
        evaluate=ComparisonConfig(prompts=["Hello"], max_new_tokens=3),
        execution=Execution(compile=False, device="cpu", threads=1),
        adapter=AdapterConfig(rank=2, alpha=8, **options),
    )
    root = str(directory / "root")
    posttrain(config, root, until="preference")
    return root


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        out = model(IDS)
    return (out if isinstance(out, Tensor) else out.logits)[..., :ROWS]


def assert_close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=2e-5 * b.abs().max().item(), rtol=1e-4)


def in_peft(base: Path, adapter: Path) -> Any:
    peft = pytest.importorskip("peft", reason="the reference")
    transformers = pytest.importorskip("transformers", reason="the reference")
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(model, adapter).eval()


@pytest.mark.slow
def test_an_imported_base_is_named_and_not_copied(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save_qwen(tmp_path / "qwen")
    root = train_adapters(tmp_path, tmp_path / "qwen")
    expected = logits(resolve_model("", root).load("cpu")[0])
    assert not torch.allclose(expected, logits(load_hugging_face(tmp_path / "qwen")), atol=1e-4)
    exported = tmp_path / "adapter"
    assert main(["export", str(exported), "--root", root]) == 0
    assert "Exported the adapter to" in capfd.readouterr().out
    assert {path.name for path in exported.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert json.loads((exported / "adapter_config.json").read_text())["r"] == 4, "two adapters are one of their ranks"
    assert_close(logits(load_any_model(exported)), expected)
    assert_close(logits(in_peft(tmp_path / "qwen", exported)), expected)
    assert main(["export", str(tmp_path / "whole"), "--root", root, "--fuse_adapter"]) == 0
    assert_close(logits(load_hugging_face(tmp_path / "whole")), expected)
    again = resolve_model(str(exported), root)
    assert again.is_post_trained and again.read_context_length() == resolve_model("", root).read_context_length()
    assert main(["sample", "--model", str(exported), "--prompt", "a", "--max_new_tokens", "2", "--root", root]) == 0
    assert main(["export", str(exported), "--root", root]) == 2
    assert "already exists; name a new or an empty directory" in capfd.readouterr().err
    config = PosttrainConfig(base=str(exported), methods=["sft"], sft=quick_config(steps=2), execution=Execution())
    record = posttrain(config, root, until="base")
    assert record["stages"]["base"]["state"] == "made", "an adapter is a model to start from"


@pytest.mark.slow
def test_a_base_with_new_tokens_is_written_beside_the_adapter(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = TransformerLM(ModelConfig(257, 64, d_model=16, num_layers=1, num_heads=2, d_ff=32))
    save_hugging_face(model, bytes_tokenizer(["<|endoftext|>"]), tmp_path / "plain")
    root = train_adapters(tmp_path, tmp_path / "plain", targets=["q_proj", "w2"])
    assert main(["export", str(tmp_path / "adapter"), "--root", root]) == 0
    moved = (tmp_path / "adapter").rename(tmp_path / "moved")
    expected = logits(resolve_model("", root).load("cpu")[0])
    assert load_hugging_face(moved / "base").config.vocab_size == 261
    assert_close(logits(load_any_model(moved)), expected)
    assert_close(logits(in_peft(moved / "base", moved)), expected)
