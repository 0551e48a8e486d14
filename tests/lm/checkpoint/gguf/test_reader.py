"""Import from GGUF: models and tokenizers that were exported come back, and others are refused by their cause."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lm.checkpoint.external import read_context_length
from lm.checkpoint.gguf.reader import find_llama3_scaling, load_gguf
from lm.checkpoint.gguf.writer import GGUFType, save_gguf
from lm.common.errors import UserError
from lm.model.config import RopeScaling
from lm.model.rope import rotary_frequencies
from tests.helpers.gguf_files import Change, gguf, renamed, rewrite, with_field, with_tensor, without
from tests.helpers.llamas import assert_same_weights
from tests.lm.checkpoint.gguf.test_writer import TOKENIZER, make_model, read_tensors

OPTIONS: list[dict[str, Any]] = [
    {},
    {"qk_norm": True, "head_dim": 24},
    {"tied_embeddings": True, "qkv_bias": True},
    {"num_kv_heads": None, "vocab_size": 999},
    {"rope_scaling": RopeScaling(kind="linear", factor=4.0)},
    {"rope_scaling": RopeScaling(factor=8.0, original_context_length=128), "head_dim": 64},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_an_exported_model_comes_back(tmp_path: Path, options: dict[str, Any]) -> None:
    model = make_model(**options)
    save_gguf(model, TOKENIZER, tmp_path / "model.gguf", "float32")
    loaded = load_gguf(tmp_path / "model.gguf")
    assert loaded.config == replace(model.config, num_kv_heads=model.config.kv_heads) and not loaded.training
    assert_same_weights(loaded, model)
    assert read_context_length(tmp_path / "model.gguf") == 64
    assert load_gguf(tmp_path / "model.gguf", 32).config.context_length == 32


@pytest.mark.parametrize("weight_type", ["bfloat16", "q8_0"])
@pytest.mark.parametrize("options", OPTIONS[:3], ids=str)
def test_smaller_types_become_the_numbers_that_the_library_reads(
    tmp_path: Path, options: dict[str, Any], weight_type: GGUFType
) -> None:
    save_gguf(make_model(**options), TOKENIZER, tmp_path / "model.gguf", weight_type)
    assert load_gguf(tmp_path / "model.gguf").token_embeddings.weight.dtype == torch.bfloat16
    loaded = load_gguf(tmp_path / "model.gguf", dtype=torch.float32)
    save_gguf(loaded, TOKENIZER, tmp_path / "again.gguf", "float32")
    again, expected = read_tensors(tmp_path / "again.gguf"), read_tensors(tmp_path / "model.gguf")
    assert again.keys() == expected.keys() and all(again[name].equal(tensor) for name, tensor in expected.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"qkv_bias": True}, {"qk_norm": True, "head_dim": 128}], ids=["llama", "qwen2", "qwen3"]
)
def test_transformers_reads_the_same_model(tmp_path: Path, options: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    save_gguf(make_model(**options), TOKENIZER, tmp_path / "model.gguf", "q8_0")
    model, tokenizer = load_gguf(tmp_path / "model.gguf", dtype=torch.float32), TOKENIZER
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    ids = torch.tensor([tokenizer.encode("Once upon a time there was a cat.")])
    with torch.no_grad():
        expected, logits = theirs(ids).logits, model(ids)
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_a_model_without_a_head_is_tied(tmp_path: Path) -> None:
    save_gguf(make_model(), TOKENIZER, tmp_path / "model.gguf")
    path = rewrite(tmp_path / "model.gguf", lambda _, tensors: tensors.pop("output.weight"))
    assert load_gguf(path).config.tied_embeddings


def test_optional_fields_may_be_missing(tmp_path: Path) -> None:
    model = make_model(num_kv_heads=None, norm_eps=1e-5, rope_theta=10000.0)
    save_gguf(model, TOKENIZER, tmp_path / "model.gguf", "float32")
    optional = ["vocab_size", "rope.freq_base", "rope.dimension_count"]
    optional += [f"attention.{name}" for name in ("key_length", "value_length", "head_count_kv")]

    def remove(fields: dict[str, Any], tensors: dict[str, Any]) -> None:
        for name in optional:
            del fields[f"llama.{name}"]
        tensors["rope_freqs.weight"] = (torch.ones(8).numpy(), gguf.GGMLQuantizationType.F32)

    loaded = load_gguf(rewrite(tmp_path / "model.gguf", remove))
    assert loaded.config == replace(model.config, num_kv_heads=model.config.kv_heads)
    assert_same_weights(loaded, model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (renamed("gemma3"), "general.architecture 'gemma3' is not supported; use a llama or a qwen2 or a qwen3"),
        (renamed("qwen3"), "embedding_length is missing"),
        (with_field("split.count", 3, "UINT16"), "is one of 3 files of a model; join them"),
        (with_field("llama.expert_count", 8), "expert_count 8 is not supported"),
        (with_field("llama.attention.sliding_window", 8), "attention.sliding_window 8 is not supported"),
        (with_field("llama.attention.value_length", 8), "attention.value_length 8 is not supported"),
        (with_field("llama.rope.dimension_count", 8), "rope.dimension_count 8 is not supported"),
        (with_field("llama.rope.scaling.type", "yarn", "STRING"), "rope.scaling.type 'yarn' is not supported"),
        (with_field("llama.attention.head_count_kv", [2, 2]), r"attention.head_count_kv is array\(\[2, 2\]"),
        (with_field("llama.block_count", 1 << 31), "too few for the 2147483648 layers"),
        (with_field("llama.block_count", 1), "has blk.1.attn_norm.weight, which no Llama"),
        (with_field("llama.block_count", 3), "has no blk.2"),
        (with_field("llama.context_length", 1 << 25), "describes an unsupported model"),
        (with_field("llama.embedding_length", 128), "has the shape"),
        (without("token_embd.weight"), "has no token_embd.weight"),
        (without("blk.0.ffn_up.weight"), "has no blk.0.ffn_up.weight"),
        (without("llama.feed_forward_length"), "feed_forward_length is missing"),
        (with_tensor("output_norm.weight", torch.full((64,), torch.nan)), "not finite"),
        (with_tensor("rope_freqs.weight", torch.linspace(1, 8, 8)), "is not the scaling of Llama 3"),
        (with_tensor("rope_freqs.weight", torch.ones(7)), "is not the scaling of Llama 3"),
    ],
)
def test_other_models_are_refused(tmp_path: Path, change: Change, message: str) -> None:
    save_gguf(make_model(), TOKENIZER, tmp_path / "model.gguf", "float32")
    path = rewrite(tmp_path / "model.gguf", change)
    with pytest.raises(UserError, match=f"changed.gguf.*{message}"):
        load_gguf(path)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_scaling_of_llama_3_is_found_from_its_divisors(factor: float) -> None:
    scaling = RopeScaling(factor=factor)
    divisors = rotary_frequencies(5e5, 128) / rotary_frequencies(5e5, 128, scaling)
    assert find_llama3_scaling(divisors, 5e5, 128) == scaling
    for other in (torch.full((64,), torch.nan), divisors.flip(0), divisors.sqrt() * 2, torch.full((64,), 2.0)):
        assert find_llama3_scaling(other, 5e5, 128) is None
