"""Hostile files: each is refused with a message, quickly, and nothing else is read or written."""

import hashlib
import json
import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from lm.checkpoint.hugging_face.model_files import load_hugging_face, save_hugging_face
from lm.checkpoint.meta import load_meta
from lm.checkpoint.safe_load import assign_weights, create_empty_model
from lm.checkpoint.single_file import load_checkpoint, save_checkpoint
from lm.checkpoint.training_checkpoint import (
    load_model,
    load_training,
    newest_checkpoint,
    read_description,
    save_training,
)
from lm.common.errors import TransientError, UserError
from lm.common.execution import Execution
from lm.inference.llama import LlamaTokenizer
from lm.model.config import ModelConfig, MoEConfig
from lm.model.transformer import TransformerLM
from lm.optim.adamw import AdamW
from lm.tokenizer.pretoken_counts import SCHEMA, merge_counts, read_counts, write_counts
from lm.tokenizer.tokenizer import Tokenizer
from lm.train.pretraining import Job
from lm.train.tracking import read_metrics
from tests.helpers.corpora import read_documents
from tests.helpers.llamas import train_sentencepiece
from tests.helpers.pretoken_counts import counts_table
from tests.helpers.tokenizers import bytes_tokenizer

NESTED = "[" * 100_000 + "]" * 100_000  # deeper than Python's parser allows
CONFIG = ModelConfig(vocab_size=257, context_length=8, d_model=4, num_layers=1, num_heads=2, d_ff=4)


# JSON files


def read_jsonl(path: Path) -> None:
    path.write_text('{"text": "a"}\n' + path.read_text())  # a file that begins with an array is refused before
    read_documents(str(path.rename(path.with_suffix(".jsonl"))))


@pytest.mark.parametrize("read", [Tokenizer.from_tokenizer_json, Job.read, read_jsonl])
def test_deeply_nested_json_is_refused(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    path = tmp_path / "file.json"
    path.write_text(NESTED)
    with pytest.raises(UserError, match=r"file\.json.*recursion"):
        read(path)


def test_deeply_nested_json_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "checkpoint.json").write_text(NESTED)
    assert read_description(tmp_path) is None
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n' + NESTED)
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1}]


# Tokenizers


@pytest.mark.parametrize(
    "about", [{"special_tokens": 5}, {"special_tokens": "ab"}, {"special_tokens": [5]}, {"pattern": 5}]
)
def test_tokenizer_config_with_wrong_types_is_refused(tmp_path: Path, about: dict[str, Any]) -> None:
    bytes_tokenizer().save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"special_tokens": [], "pattern": "a", **about}))
    with pytest.raises(UserError, match="does not name special_tokens, pattern"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("vocab", [[["a", 1]], [[1]], "ab", [1], 5])
def test_vocabulary_that_is_not_an_object_is_refused(tmp_path: Path, vocab: Any) -> None:
    bytes_tokenizer().save_tokenizer_json(tmp_path / "tokenizer.json")
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["vocab"] = vocab
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="is not a Hugging Face tokenizer"):
        Tokenizer.from_tokenizer_json(tmp_path / "tokenizer.json")


def test_huge_token_ids_are_refused() -> None:
    vocab = {i: bytes([i]) for i in range(256)}
    max_id = (1 << 24) - 1
    assert Tokenizer(vocab | {max_id: b"<s>"}, [], ["<s>"]).encode("<s>") == [max_id]
    for token_id in (max_id + 1, 1 << 32, 10**30):
        with pytest.raises(UserError, match=f"id {token_id} exceeds the limit of 16777215"):
            Tokenizer(vocab | {token_id: b"<s>"}, [], ["<s>"])
    with pytest.raises(UserError, match="exceeds the limit"):
        Tokenizer(vocab | {max_id: b"<s>"}, [], ["<s>", "<t>"])


def test_damaged_sentencepiece_model_is_refused(tmp_path: Path) -> None:
    path = train_sentencepiece(tmp_path / "tokenizer.model", ["once upon a time"] * 30, 280, hard_vocab_limit=False)
    intact = path.read_bytes()
    for old, new in ((b"<0x41>", b"<0xZZ>"), (b"once", b"\xff\xfe\xfd\xfc")):
        assert old in intact
        path.write_bytes(intact.replace(old, new))
        with pytest.raises(UserError, match=r"tokenizer\.model (is damaged|cannot be read)"):
            LlamaTokenizer.load(path)


# Pretoken counts


def test_damaged_counts_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "counts.parquet"
    write_counts(path, counts_table({f"word{i}": i + 1 for i in range(500)}))
    data = path.read_bytes()
    refused = 0
    for i in range(4, len(data) // 2, 97):
        path.write_bytes(data[:i] + bytes([data[i] ^ 0xFF]) + data[i + 1 :])
        try:
            read_counts(path)
        except UserError:
            refused += 1
            with pytest.raises(UserError, match=r"counts\.parquet"):
                merge_counts([path, path], tmp_path / "sum.parquet")
    assert refused


@pytest.mark.parametrize(
    ("pretokens", "counts"),
    [([None], [1]), ([b"a"], [None]), ([b"a"], [-1]), ([b"a"], [0]), ([b"a", b"b"], [1 << 62, 1])],
)
def test_invalid_counts_are_refused(tmp_path: Path, pretokens: list[Any], counts: list[Any]) -> None:
    path = tmp_path / "counts.parquet"
    with pq.ParquetWriter(path, SCHEMA) as writer:
        for number in range(16):
            rows = (pretokens, counts) if number == 7 else ([], [])
            writer.write_table(pa.table([*rows], schema=SCHEMA))
    for reader in (read_counts, lambda path: merge_counts([path], tmp_path / "sum.parquet")):
        with pytest.raises(UserError, match="not all rows have a pretoken and its count"):
            reader(path)


# Checkpoints


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """An intact checkpoint directory."""
    model = TransformerLM(CONFIG)
    save_training(tmp_path / "step-5", model, [AdamW(model.parameters())], 5, {})
    return tmp_path / "step-5"


def forge_description(directory: Path, **changes: Any) -> None:
    """Change the description of a checkpoint, and update all checksums, as an attacker would."""
    description = json.loads((directory / "checkpoint.json").read_text())
    del description["sha256"]
    for name in description["files"]:
        data = (directory / name).read_bytes()
        description["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    description |= changes
    description["sha256"] = hashlib.sha256(json.dumps(description).encode()).hexdigest()
    (directory / "checkpoint.json").write_text(json.dumps(description, indent=1))


def test_forged_description_is_accepted(saved: Path) -> None:
    forge_description(saved)
    assert newest_checkpoint(saved.parent) == saved


@pytest.mark.parametrize(
    "changes",
    [
        {"step": "NaN"},
        {"step": None},
        {"model": []},
        {"files": {}},
        {"files": {"model.safetensors": {"bytes": 0, "sha256": ""}}},
        {"files": {"../x": {}, "model.safetensors": {}}},
        {"files": {"/dev/zero": {"bytes": 0, "sha256": ""}, "optimizer.pt": {}}},
        {"files": []},
    ],
)
def test_malformed_description_is_ignored(saved: Path, changes: dict[str, Any]) -> None:
    forge_description(saved, **changes)
    assert read_description(saved) is None and newest_checkpoint(saved.parent) is None
    with pytest.raises(UserError, match="not an intact checkpoint"):
        load_model(saved)


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("/dev/zero"), os.mkfifo])
def test_special_file_is_not_read(saved: Path, make: Callable[[Path], None]) -> None:
    (saved / "optimizer.pt").unlink()
    make(saved / "optimizer.pt")
    assert read_description(saved) is None


@pytest.mark.parametrize("header", [b"{", b"[]", b'{"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}'])
def test_damaged_weights_with_forged_checksums_are_refused(saved: Path, header: bytes) -> None:
    (saved / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    forge_description(saved)
    model = TransformerLM(CONFIG)
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read"):
        load_model(saved)
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read"):
        load_training(saved, model, [AdamW(model.parameters())])


@pytest.mark.parametrize(
    "state",
    [
        5,
        {},
        {"optimizers": 5, "rng": {}},
        {"optimizers": [], "rng": {"cpu": torch.zeros(3), "cuda": []}},
        {"rng": {"cpu": torch.zeros(3, dtype=torch.uint8), "cuda": []}},
        {"rng": {"cpu": torch.zeros(3), "cuda": []}},
        {"rng": {"cpu": None, "cuda": []}},
    ],
)
def test_malformed_optimizer_state_is_refused(saved: Path, state: Any) -> None:
    model = TransformerLM(CONFIG)
    if isinstance(state, dict) and "rng" in state:
        state = {"optimizers": [AdamW(model.parameters()).state_dict()], **state}
    torch.save(state, saved / "optimizer.pt")
    forge_description(saved)
    with pytest.raises(UserError, match="step-5"):
        load_training(saved, model, [AdamW(model.parameters())])


@pytest.mark.parametrize("shape", [(3,), ()])
def test_optimizer_moments_of_another_shape_are_refused(saved: Path, shape: tuple[int, ...]) -> None:
    model = TransformerLM(CONFIG)
    optimizer = AdamW(model.parameters())
    sum(parameter.sum() for parameter in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    save_training(saved, model, [optimizer], 5, {})
    assert load_training(saved, model, [AdamW(model.parameters())]) == 5
    state = torch.load(saved / "optimizer.pt", weights_only=True)
    state["optimizers"][0]["state"][0]["m"] = torch.zeros(shape)
    torch.save(state, saved / "optimizer.pt")
    forge_description(saved)
    with pytest.raises(UserError, match="step-5 belongs to another optimizer config: m is"):
        load_training(saved, model, [AdamW(model.parameters())])


@pytest.mark.parametrize(
    "shape",
    [{"num_layers": 10**9}, {"d_model": 10**9, "num_heads": 1}, {"vocab_size": 10**30}, {"context_length": 10**12}],
)
def test_huge_model_is_refused_before_allocation(saved: Path, shape: dict[str, int]) -> None:
    description = json.loads((saved / "checkpoint.json").read_text())
    forge_description(saved, model={**description["model"], **shape})
    with pytest.raises(UserError, match=r"layers|does not fit|too few|cannot be created|context_length"):
        load_model(saved)


NOT_PLAIN = {
    "sparse": torch.zeros(257, 4).to_sparse(),
    "meta": torch.empty(257, 4, device="meta"),
    "complex": torch.zeros(257, 4, dtype=torch.complex64),
    "whole": torch.zeros(257, 4, dtype=torch.int32),
    "text": "a",
    "list": [1.0],
    "none": None,
    "expanded": torch.zeros(1).expand(257, 4),
}


@pytest.mark.parametrize("kind", NOT_PLAIN)
def test_weight_that_is_not_a_plain_tensor_is_refused(tmp_path: Path, kind: str) -> None:
    model = TransformerLM(CONFIG)
    weights = {**model.state_dict(), "token_embeddings.weight": NOT_PLAIN[kind]}
    torch.save({"model": weights, "optimizer": {}, "iteration": 1}, tmp_path / "c.pt")
    with pytest.raises(UserError, match=r"plain tensors|does not fit"):
        load_checkpoint(tmp_path / "c.pt", model)


@pytest.mark.parametrize(
    "changes", [{"iteration": "1"}, {"iteration": torch.zeros(3)}, {"model": 1.5}, {"model": {5: 1}}]
)
def test_malformed_single_file_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = TransformerLM(CONFIG)
    save_checkpoint(model, AdamW(model.parameters()), 1, tmp_path / "c.pt")
    torch.save({**torch.load(tmp_path / "c.pt", weights_only=True), **changes}, tmp_path / "c.pt")
    with pytest.raises(UserError, match=r"c\.pt"):
        load_checkpoint(tmp_path / "c.pt", model, AdamW(model.parameters()))


# Checkpoints of other projects


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": 10**400},
        {"hidden_size": 10**30},
        {"vocab_size": 1 << 62},
        {"intermediate_size": 1 << 39},
        {"max_position_embeddings": 10**11},
        {"rope_theta": 1e300},
        {"rms_norm_eps": 10**400},
    ],
)
def test_hugging_face_config_with_huge_numbers_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    directory = tmp_path / "llama"
    save_hugging_face(TransformerLM(CONFIG), bytes_tokenizer(["<|endoftext|>"]), directory)
    config = json.loads((directory / "config.json").read_text())
    del config["rope_parameters"]
    (directory / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(UserError, match="llama"):
        load_hugging_face(directory)


@pytest.mark.parametrize(
    ("context", "width", "message"),
    [
        (1 << 24, 18, "16,777,216 tokens and heads of 18 has more than 268,435,456 numbers"),
        (1 << 20, 128, "1,048,576 tokens and heads of 128 does not fit into memory.*can't allocate memory"),
    ],
)
def test_a_huge_rotary_table_is_refused(
    monkeypatch: pytest.MonkeyPatch, context: int, width: int, message: str
) -> None:
    """A context of 1 M tokens, as published models have it, is within the bound; here the memory is too small."""
    model = create_empty_model(replace(CONFIG, context_length=context, d_model=width, num_heads=1), 9, "model")
    weights = {name: torch.zeros(tensor.shape) for name, tensor in model.state_dict().items()}
    monkeypatch.setattr("lm.model.rope.RotaryEmbedding.fill", lambda *_: torch.empty(1 << 60))
    with pytest.raises(UserError, match=message):
        assign_weights(model, weights, "model", "cpu")


@pytest.mark.parametrize("changes", [{"dim": 10**400}, {"ffn_dim_multiplier": 1e308}, {"multiple_of": 10**30}])
def test_meta_params_with_huge_numbers_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    params = {"dim": 4, "n_layers": 1, "n_heads": 2, "vocab_size": -1, **changes}
    (tmp_path / "params.json").write_text(json.dumps(params))
    torch.save({"tok_embeddings.weight": torch.zeros(8, 4)}, tmp_path / "consolidated.00.pth")
    with pytest.raises(UserError, match=str(tmp_path)):
        load_meta(tmp_path, 8)


@pytest.mark.parametrize("kind", ["sparse", "meta", "expanded"])
def test_meta_weight_that_is_not_a_plain_tensor_is_refused(tmp_path: Path, kind: str) -> None:
    (tmp_path / "params.json").write_text('{"dim": 4, "n_layers": 1, "n_heads": 2, "vocab_size": -1}')
    torch.save({"tok_embeddings.weight": NOT_PLAIN[kind]}, tmp_path / "consolidated.00.pth")
    with pytest.raises(UserError, match="dict of plain tensors"):
        load_meta(tmp_path, 8)


def test_an_expert_with_a_number_of_5000_digits_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "mixtral"
    config = replace(CONFIG, moe=MoEConfig(3, 2))
    save_hugging_face(TransformerLM(config), bytes_tokenizer(["<|endoftext|>"]), directory)
    weights = load_file(directory / "model.safetensors")
    name = "model.layers.0.block_sparse_moe.experts.0.w1.weight"
    weights[name.replace(".0.w1", f".{'1' * 5000}.w1")] = weights.pop(name)
    save_file(weights, directory / "model.safetensors")
    with pytest.raises(UserError, match=r"the experts of .* are not complete"):
        load_hugging_face(directory)


def test_safetensors_of_complex_numbers_are_refused(tmp_path: Path) -> None:
    directory = tmp_path / "llama"
    save_hugging_face(TransformerLM(CONFIG), bytes_tokenizer(["<|endoftext|>"]), directory)
    save_file({"model.norm.weight": torch.zeros(4, dtype=torch.complex64)}, directory / "model.safetensors")
    with pytest.raises(UserError, match="llama"):
        load_hugging_face(directory)


# Configurations and networks


@pytest.mark.parametrize("fields", [{"threads": "4"}, {"device": 5}, {"trackers": ["os"]}, {"compile": 5}])
def test_execution_field_of_another_type_is_refused(fields: dict[str, Any]) -> None:
    """Trackers are imported as modules, so unknown names must be refused."""
    with pytest.raises(UserError, match=f"execution.{next(iter(fields))}"):
        Execution(**fields)


def test_network_failure_of_a_glob_is_transient(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise ConnectionError("reset")

    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.glob", fail)
    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.exists", lambda *arguments: False)
    from lm.text.sources import expand_urls

    with pytest.raises(TransientError, match="reset"):
        expand_urls(["memory://corpus/*.txt"])
