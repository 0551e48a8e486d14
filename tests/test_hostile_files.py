"""Files that are made to harm: each is refused with a message, at once, and nothing outside is touched."""

import hashlib
import io
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from lm.checkpoint import (
    load_checkpoint,
    load_model,
    load_training,
    newest_checkpoint,
    read_description,
    save_checkpoint,
    save_training,
)
from lm.convert import load_hugging_face, load_meta, save_hugging_face
from lm.counts import SCHEMA, merge_counts, read_counts, write_counts
from lm.errors import Unreachable, UserError
from lm.execution import Execution
from lm.llama_tokenizer import LlamaTokenizer
from lm.metrics import read_metrics
from lm.model import ModelConfig, TransformerLM
from lm.optim import AdamW
from lm.tokenizer import Tokenizer
from lm.train import Job
from tests.corpora import read
from tests.tokenizers_made import bytes_tokenizer, counts_table

NESTED = "[" * 100_000 + "]" * 100_000  # more than Python reads
CONFIG = ModelConfig(vocab_size=257, context_length=8, d_model=4, num_layers=1, num_heads=2, d_ff=4)


def optimizer_of(model: nn.Module) -> AdamW:
    return AdamW(model.parameters())


# JSON


def jsonl(path: Path) -> None:
    read(str(path.rename(path.with_suffix(".jsonl"))))


@pytest.mark.parametrize("read", [Tokenizer.from_tokenizer_json, Job.read, jsonl])
def test_json_without_end_is_refused(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    path = tmp_path / "file.json"
    path.write_text(NESTED)
    with pytest.raises(UserError, match=r"file\.json.*recursion"):
        read(path)


def test_json_without_end_is_no_row_and_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "checkpoint.json").write_text(NESTED)
    assert read_description(tmp_path) is None
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n' + NESTED)
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1}]


# tokenizers


@pytest.mark.parametrize(
    "about", [{"special_tokens": 5}, {"special_tokens": "ab"}, {"special_tokens": [5]}, {"pattern": 5}]
)
def test_a_tokenizer_config_of_other_types_is_refused(tmp_path: Path, about: dict[str, Any]) -> None:
    bytes_tokenizer().save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"special_tokens": [], "pattern": "a", **about}))
    with pytest.raises(UserError, match="does not name special_tokens and pattern"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("vocab", [[["a", 1]], [[1]], "ab", [1], 5])
def test_a_vocabulary_that_is_no_object_is_refused(tmp_path: Path, vocab: Any) -> None:
    bytes_tokenizer().save_tokenizer_json(tmp_path / "tokenizer.json")
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["vocab"] = vocab
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="is not a Hugging Face tokenizer"):
        Tokenizer.from_tokenizer_json(tmp_path / "tokenizer.json")


def test_ids_that_would_take_gigabytes_are_refused() -> None:
    vocab = {i: bytes([i]) for i in range(256)}
    most = (1 << 24) - 1
    assert Tokenizer(vocab | {most: b"<s>"}, [], ["<s>"]).encode("<s>") == [most]
    for token_id in (most + 1, 1 << 32, 10**30):
        with pytest.raises(UserError, match=f"id {token_id} is past 16777215"):
            Tokenizer(vocab | {token_id: b"<s>"}, [], ["<s>"])
    with pytest.raises(UserError, match="is past"):
        Tokenizer(vocab | {most: b"<s>"}, [], ["<s>", "<t>"])


def test_a_damaged_sentencepiece_model_is_refused(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["once upon a time"] * 30), model_writer=model, vocab_size=280, byte_fallback=True,
        model_type="bpe", hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    for old, new in ((b"<0x41>", b"<0xZZ>"), (b"once", b"\xff\xfe\xfd\xfc")):
        assert old in model.getvalue()
        (tmp_path / "tokenizer.model").write_bytes(model.getvalue().replace(old, new))
        with pytest.raises(UserError, match=r"tokenizer\.model (is damaged|cannot be read)"):
            LlamaTokenizer.load(tmp_path / "tokenizer.model")


# counts


def test_damaged_pages_of_counts_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "counts.parquet"
    write_counts(path, counts_table({f"word{i}": i + 1 for i in range(500)}))
    data = path.read_bytes()
    refused = 0
    for place in range(4, len(data) // 2, 97):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :])
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
def test_counts_that_are_none_are_refused(tmp_path: Path, pretokens: list[Any], counts: list[Any]) -> None:
    path = tmp_path / "counts.parquet"
    with pq.ParquetWriter(path, SCHEMA) as writer:
        for number in range(16):
            rows = (pretokens, counts) if number == 7 else ([], [])
            writer.write_table(pa.table([*rows], schema=SCHEMA))
    for reader in (read_counts, lambda path: merge_counts([path], tmp_path / "sum.parquet")):
        with pytest.raises(UserError, match="not all rows have a pretoken and its count"):
            reader(path)


# checkpoints


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint directory."""
    model = TransformerLM(CONFIG)
    save_training(tmp_path / "step-5", model, [optimizer_of(model)], 5, {})
    return tmp_path / "step-5"


def describe(directory: Path, **changes: Any) -> None:
    """Change the description of a checkpoint, and make it and the digests fit, as an attacker would."""
    about = json.loads((directory / "checkpoint.json").read_text())
    del about["sha256"]
    for name in about["files"]:
        data = (directory / name).read_bytes()
        about["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    about |= changes
    about["sha256"] = hashlib.sha256(json.dumps(about).encode()).hexdigest()
    (directory / "checkpoint.json").write_text(json.dumps(about, indent=1))


def test_a_description_that_is_made_to_fit_is_read(saved: Path) -> None:
    describe(saved)
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
def test_a_description_of_another_shape_is_none(saved: Path, changes: dict[str, Any]) -> None:
    describe(saved, **changes)
    assert read_description(saved) is None and newest_checkpoint(saved.parent) is None
    with pytest.raises(UserError, match="not an intact checkpoint"):
        load_model(saved)


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("/dev/zero"), os.mkfifo])
def test_a_file_that_never_ends_is_not_read(saved: Path, make: Callable[[Path], None]) -> None:
    (saved / "optimizer.pt").unlink()
    make(saved / "optimizer.pt")
    assert read_description(saved) is None


@pytest.mark.parametrize("header", [b"{", b"[]", b'{"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}'])
def test_damaged_weights_with_fitting_digests_are_refused(saved: Path, header: bytes) -> None:
    (saved / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    describe(saved)
    model = TransformerLM(CONFIG)
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read"):
        load_model(saved)
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read"):
        load_training(saved, model, [optimizer_of(model)])


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
def test_other_states_are_refused(saved: Path, state: Any) -> None:
    model = TransformerLM(CONFIG)
    if isinstance(state, dict) and "rng" in state:
        state = {"optimizers": [optimizer_of(model).state_dict()], **state}
    torch.save(state, saved / "optimizer.pt")
    describe(saved)
    with pytest.raises(UserError, match="step-5"):
        load_training(saved, model, [optimizer_of(model)])


def test_moments_of_another_shape_are_refused(saved: Path) -> None:
    model = TransformerLM(CONFIG)
    optimizer = optimizer_of(model)
    sum(parameter.sum() for parameter in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    save_training(saved, model, [optimizer], 5, {})
    assert load_training(saved, model, [optimizer_of(model)]) == 5
    state = torch.load(saved / "optimizer.pt", weights_only=True)
    state["optimizers"][0]["state"][0]["m"] = torch.zeros(3)
    torch.save(state, saved / "optimizer.pt")
    describe(saved)
    with pytest.raises(UserError, match="step-5 belongs to another optimizer config: m is"):
        load_training(saved, model, [optimizer_of(model)])


@pytest.mark.parametrize(
    "shape",
    [{"num_layers": 10**9}, {"d_model": 10**9, "num_heads": 1}, {"vocab_size": 10**30}, {"context_length": 10**12}],
)
def test_a_model_that_asks_for_too_much_is_refused_at_once(saved: Path, shape: dict[str, int]) -> None:
    """Before it has taken memory, or made a billion layers."""
    description = json.loads((saved / "checkpoint.json").read_text())
    describe(saved, model={**description["model"], **shape})
    with pytest.raises(UserError, match=r"layers|does not fit|cannot be made|context_length"):
        load_model(saved)


STRANGE = {
    "sparse": torch.zeros(257, 4).to_sparse(),
    "meta": torch.empty(257, 4, device="meta"),
    "complex": torch.zeros(257, 4, dtype=torch.complex64),
    "whole": torch.zeros(257, 4, dtype=torch.int32),
    "text": "a",
    "list": [1.0],
    "none": None,
}


@pytest.mark.parametrize("kind", STRANGE)
def test_a_weight_that_is_none_is_refused(tmp_path: Path, kind: str) -> None:
    model = TransformerLM(CONFIG)
    weights = {**model.state_dict(), "token_embeddings.weight": STRANGE[kind]}
    torch.save({"model": weights, "optimizer": {}, "iteration": 1}, tmp_path / "c.pt")
    with pytest.raises(UserError, match=r"plain tensors|does not fit"):
        load_checkpoint(tmp_path / "c.pt", model)


@pytest.mark.parametrize(
    "changes", [{"iteration": "1"}, {"iteration": torch.zeros(3)}, {"model": 1.5}, {"model": {5: 1}}]
)
def test_other_parts_of_a_single_file_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = TransformerLM(CONFIG)
    save_checkpoint(model, optimizer_of(model), 1, tmp_path / "c.pt")
    torch.save({**torch.load(tmp_path / "c.pt", weights_only=True), **changes}, tmp_path / "c.pt")
    with pytest.raises(UserError, match=r"c\.pt"):
        load_checkpoint(tmp_path / "c.pt", model, optimizer_of(model))


# others' checkpoints


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
def test_a_hugging_face_config_of_no_size_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    directory = tmp_path / "llama"
    save_hugging_face(TransformerLM(CONFIG), bytes_tokenizer(["<|endoftext|>"]), directory)
    config = json.loads((directory / "config.json").read_text())
    del config["rope_parameters"]
    (directory / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(UserError, match="llama"):
        load_hugging_face(directory)


@pytest.mark.parametrize("changes", [{"dim": 10**400}, {"ffn_dim_multiplier": 1e308}, {"multiple_of": 10**30}])
def test_params_of_no_size_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    params = {"dim": 4, "n_layers": 1, "n_heads": 2, "vocab_size": -1, **changes}
    (tmp_path / "params.json").write_text(json.dumps(params))
    torch.save({"tok_embeddings.weight": torch.zeros(8, 4)}, tmp_path / "consolidated.00.pth")
    with pytest.raises(UserError, match=str(tmp_path)):
        load_meta(tmp_path, 8)


@pytest.mark.parametrize("kind", ["sparse", "meta"])
def test_a_meta_weight_that_is_none_is_refused(tmp_path: Path, kind: str) -> None:
    (tmp_path / "params.json").write_text('{"dim": 4, "n_layers": 1, "n_heads": 2, "vocab_size": -1}')
    torch.save({"tok_embeddings.weight": STRANGE[kind]}, tmp_path / "consolidated.00.pth")
    with pytest.raises(UserError, match="dict of plain tensors"):
        load_meta(tmp_path, 8)


def test_safetensors_of_a_kind_that_is_no_weight_are_refused(tmp_path: Path) -> None:
    directory = tmp_path / "llama"
    save_hugging_face(TransformerLM(CONFIG), bytes_tokenizer(["<|endoftext|>"]), directory)
    save_file({"model.norm.weight": torch.zeros(4, dtype=torch.complex64)}, directory / "model.safetensors")
    with pytest.raises(UserError, match="llama"):
        load_hugging_face(directory)


# configurations, and networks


@pytest.mark.parametrize("fields", [{"threads": "4"}, {"device": 5}, {"trackers": ["os"]}, {"compile": 5}])
def test_a_field_of_another_type_is_refused(fields: dict[str, Any]) -> None:
    """Trackers are modules that are imported: no others than those that are known."""
    with pytest.raises(UserError, match=f"execution.{next(iter(fields))}"):
        Execution(**fields)


def test_a_glob_on_a_network_that_fails_may_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise ConnectionError("reset")

    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.glob", fail)
    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.exists", lambda *arguments: False)
    from lm.corpus import expand

    with pytest.raises(Unreachable, match="reset"):
        expand(["memory://corpus/*.txt"])
