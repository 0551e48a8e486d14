"""Files of other projects' training code and tools: loaded if they hold a whole model, else refused by their cause."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lm.checkpoint.external import load_external
from lm.checkpoint.hugging_face.model_files import load_hugging_face, save_hugging_face
from lm.common.errors import UserError
from lm.inference.completion import complete
from lm.inference.config import SampleConfig
from lm.model.config import ModelConfig
from lm.model.transformer import TransformerLM
from lm.text.pretokenize import END_OF_TEXT
from lm.tokenizer.tokenizer import Tokenizer
from tasks.import_model import find_model_files
from tasks.runtime.store import Store
from tests.helpers.llamas import assert_same_weights
from tests.helpers.tokenizers import bytes_tokenizer

Q = "model.layers.0.self_attn.q_proj.weight"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def write_model(directory: Path, tied: bool = False) -> TransformerLM:
    config = ModelConfig(
        vocab_size=257, context_length=16, d_model=16, num_layers=2, num_heads=2, d_ff=24, tied_embeddings=tied
    )
    torch.manual_seed(1)
    model = TransformerLM(config).eval()
    save_hugging_face(model, bytes_tokenizer([END_OF_TEXT]), directory)
    return model


def rewrite(directory: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    path = directory / "model.safetensors"
    save_file(change(load_file(path)), path)


def rename(change: Callable[[str], str]) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {change(name): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "change",
    [
        lambda name: f"_orig_mod.{name}",
        lambda name: f"module.{name}",
        lambda name: f"module._orig_mod.{name}",
        lambda name: f"base_model.model.{name}",
        lambda name: f"language_model.{name}",
        lambda name: name.replace("model.", "model.language_model."),
        lambda name: name.replace(".self_attn.", "._checkpoint_wrapped_module.self_attn."),
        lambda name: name.replace("model.", ""),
    ],
    ids=["compile", "ddp", "both", "peft", "multimodal", "transformers 5", "inside", "bare"],
)
def test_prefixes_of_training_code_are_removed(tmp_path: Path, change: Callable[[str], str], tied: bool) -> None:
    model = write_model(tmp_path / "model", tied)
    rewrite(tmp_path / "model", rename(change))
    assert_same_weights(load_hugging_face(tmp_path / "model"), model)


def test_a_tied_model_may_have_only_the_head(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", tied=True)
    rewrite(tmp_path / "model", rename(lambda name: HEAD if name == EMBEDDING else name))
    assert_same_weights(load_hugging_face(tmp_path / "model"), model)


@pytest.mark.parametrize("name", [HEAD, "model.norm.weight"])
def test_parameters_of_several_dtypes_get_that_of_the_embedding(tmp_path: Path, name: str) -> None:
    model = write_model(tmp_path / "model")
    save_hugging_face(model.bfloat16(), bytes_tokenizer([END_OF_TEXT]), tmp_path / "bfloat16")
    rewrite(tmp_path / "bfloat16", lambda tensors: tensors | {name: tensors[name].float()})
    loaded, tokenizer = load_external(tmp_path / "bfloat16")
    assert_same_weights(loaded, model)
    config = SampleConfig(prompts=["a"], temperature=0, max_new_tokens=3)
    assert complete(loaded, tokenizer, config) == complete(model, tokenizer, config)
    widened, _ = load_external(tmp_path / "bfloat16", dtype=torch.float32)
    assert {parameter.dtype for parameter in widened.parameters()} == {torch.float32}


@pytest.mark.parametrize("special", [True, False])
def test_added_tokens_without_a_row_are_left_out(
    tmp_path: Path, special: bool, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(tmp_path / "model")
    path = tmp_path / "model" / "tokenizer.json"
    content = json.loads(path.read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"] += [{"id": 257 + i, "content": f"<pad{i}>", "special": special} | flags for i in range(2)]
    path.write_text(json.dumps(content))
    with caplog.at_level(logging.WARNING):
        model, tokenizer = load_external(tmp_path / "model")
    assert isinstance(tokenizer, Tokenizer) and (tokenizer.size, model.config.vocab_size) == (257, 257)
    assert "the model neither reads nor writes <pad0>, <pad1>." in caplog.text
    assert tokenizer.encode("<pad0>" + END_OF_TEXT) == [*b"<pad0>", 256]
    tokenizer.save(tmp_path / "saved")


def with_config(**fields: Any) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return write


def with_tensors(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Callable[[Path], None]:
    return lambda directory: rewrite(directory, change)


def without(name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {other: tensor for other, tensor in tensors.items() if other != name}


def renamed_weights(name: str) -> Callable[[Path], Any]:
    return lambda directory: (directory / "model.safetensors").rename(directory / name)


def only(name: str, content: str = "{}") -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        for path in directory.iterdir():
            path.unlink()
        (directory / name).write_text(content)

    return write


def quantized(method: str | None, *others: str) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        if method:
            with_config(quantization_config={"quant_method": method})(directory)
        packed = {Q.replace("weight", name): torch.ones(2, 16, dtype=torch.int32) for name in ("qweight", *others)}
        rewrite(directory, lambda tensors: without(Q, tensors) | packed)

    return write


def lfs_pointer(name: str) -> Callable[[Path], Any]:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    return lambda directory: (directory / name).write_text(pointer)


ADAPTER = json.dumps({"base_model_name_or_path": "org/base"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            quantized("gptq"),
            r"torch\.int32: the weights are quantized \(GPTQ\).*use the original model, or a GGUF file",
        ),
        (quantized("awq", "qzeros"), r"torch\.int32: the weights are quantized \(AWQ\).*use the original model"),
        (quantized("other"), r"torch\.int32: the weights are quantized \(other\)"),
        (quantized(None, "g_idx"), r"torch\.int32: the weights are quantized \(GPTQ\)"),
        (quantized(None, "qzeros"), r"torch\.int32: the weights are quantized \(AWQ or GPTQ\)"),
        (
            with_tensors(lambda tensors: tensors | {Q: tensors[Q].to(torch.float8_e4m3fn)}),
            r"q_proj\.weight is float8 without model\.layers\.0\.self_attn\.q_proj\.weight_scale_inv",
        ),
        (
            with_tensors(lambda tensors: tensors | {Q: tensors[Q].to(torch.uint8)}),
            r"q_proj\.weight is torch\.uint8: the weights are quantized",
        ),
        (with_tensors(lambda tensors: without(HEAD, tensors)), r"has no lm_head\.weight, so the model cannot write"),
        (
            with_tensors(lambda tensors: without(HEAD, tensors) | {"score.weight": torch.ones(1, 16)}),
            r"score\.weight in place of lm_head\.weight: it is a reward model or a classifier",
        ),
        (
            with_tensors(lambda tensors: tensors | {Q.replace("weight", "lora_A.default.weight"): torch.ones(2, 16)}),
            r"lora_A\.default\.weight, a matrix of an adapter \(LoRA\) that is not merged; merge it",
        ),
        (
            with_tensors(lambda tensors: tensors | {f"module.{Q}": tensors[Q].clone()}),
            "holds the same tensor under two names",
        ),
        (renamed_weights("pytorch_model.bin"), r"pytorch_model\.bin is damaged or not a checkpoint"),
        (renamed_weights("tf_model.h5"), r"tf_model\.h5 is not safetensors; load it with transformers"),
        (renamed_weights("model-00001-of-00002.safetensors"), r"model\.safetensors\.index\.json is missing"),
        (only("model.gguf"), r"model\.gguf is GGUF; name the file itself"),
        (only("adapter_config.json", ADAPTER), "an adapter of the model 'org/base', and there is no such"),
        (only("pytorch_model-00001-of-00003.bin"), r"pytorch_model\.bin\.index\.json is missing"),
        (lfs_pointer("model.safetensors"), r"model\.safetensors is a pointer of Git LFS.*git lfs pull"),
        (lfs_pointer("tokenizer.json"), r"tokenizer\.json is a pointer of Git LFS.*git lfs pull"),
        (lfs_pointer("tokenizer.model"), r"tokenizer\.model is a pointer of Git LFS.*git lfs pull"),
    ],
)
def test_each_cause_has_its_message(tmp_path: Path, change: Callable[[Path], Any], message: str) -> None:
    write_model(tmp_path / "model")
    change(tmp_path / "model")
    with pytest.raises(UserError, match=message):
        load_external(tmp_path / "model")


def test_a_pointer_of_metas_weights_is_named(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text("{}")
    lfs_pointer("consolidated.00.pth")(tmp_path)
    with pytest.raises(UserError, match=r"consolidated\.00\.pth is a pointer of Git LFS"):
        load_external(tmp_path)


def test_a_tied_reward_model_is_named(tmp_path: Path) -> None:
    write_model(tmp_path / "model", tied=True)
    rewrite(tmp_path / "model", lambda tensors: tensors | {"score.weight": torch.ones(1, 16)})
    with pytest.raises(UserError, match="it is a reward model"):
        load_hugging_face(tmp_path / "model")


def test_a_base_without_readable_files_is_refused_by_its_cause(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(UserError, match=r"model\.gguf is GGUF"):
        find_model_files(tmp_path, Store(str(tmp_path / "root")))
