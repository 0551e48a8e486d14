"""Fuzz targets: checkpoints of this project, of Meta, of Hugging Face and in GGUF. Each is a valid one with random
damage."""

import copy
import hashlib
import io
import json
import struct
import tempfile
import zipfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save

from lm.checkpoint.external import load_any_model, load_external
from lm.checkpoint.gguf.writer import save_gguf
from lm.checkpoint.hugging_face.model_files import load_hugging_face, save_hugging_face
from lm.checkpoint.meta import load_meta
from lm.checkpoint.peft import CONFIG_FILE, WEIGHTS_FILE, StoredAdapter, read_served_peft, save_peft
from lm.checkpoint.safe_load import is_plain_tensor
from lm.checkpoint.single_file import load_checkpoint, save_checkpoint
from lm.checkpoint.training_checkpoint import (
    load_model,
    load_training,
    newest_checkpoint,
    save_training,
)
from lm.inference.runners.runner import prepare_for_inference
from lm.inference.served_adapters import use_adapters
from lm.model.config import ModelConfig
from lm.model.transformer import TransformerLM
from lm.optim.adamw import AdamW
from lm.tokenizer.tokenizer import Tokenizer
from lm.train.pretraining import Job
from tests.fuzz.choices import Choices, json_bytes, mutate, mutate_bytes
from tests.helpers.adapters import random_adapter
from tests.helpers.tokenizers import bytes_tokenizer
from tests.helpers.training import write_job

CONFIG = ModelConfig(vocab_size=257, context_length=8, d_model=4, num_layers=1, num_heads=2, num_kv_heads=1, d_ff=4)
PARAMS: dict[str, Any] = {"dim": 4, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "multiple_of": 4, "vocab_size": -1}
PARAMS |= {"norm_eps": 1e-5, "ffn_dim_multiplier": 0.4}


@cache
def _trained_model() -> tuple[TransformerLM, AdamW]:
    model = TransformerLM(CONFIG)
    optimizer = AdamW(model.parameters())
    model(torch.zeros(1, 2, dtype=torch.int64)).sum().backward()
    optimizer.step()
    return model, optimizer


@cache
def _checkpoint_files(kind: str) -> dict[str, bytes]:
    """Return the files of a checkpoint directory."""
    model, optimizer = _trained_model()
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / kind
        if kind == "ours":
            save_training(directory, model, [optimizer], 5, {"seed": 1})
        else:
            save_hugging_face(model, bytes_tokenizer(["<|endoftext|>"]), directory)
        return {path.name: path.read_bytes() for path in directory.iterdir()}


@cache
def _single_file() -> bytes:
    file = io.BytesIO()
    save_checkpoint(*_trained_model(), 5, file)
    return file.getvalue()


@cache
def _gguf_file() -> bytes:
    tokenizer = Tokenizer({i: bytes([i]) for i in range(256)} | {256: b"ab"}, [(b"a", b"b")], ["<|endoftext|>"])
    with tempfile.TemporaryDirectory() as folder:
        save_gguf(TransformerLM(replace(CONFIG, vocab_size=258)), tokenizer, Path(folder) / "model.gguf", "float32")
        return (Path(folder) / "model.gguf").read_bytes()


@cache
def _meta_weights() -> dict[str, torch.Tensor]:
    names = {"token_embeddings": "tok_embeddings", "attn.q_proj": "attention.wq", "attn.k_proj": "attention.wk"}
    names |= {"attn.v_proj": "attention.wv", "attn.output_proj": "attention.wo", "ffn.": "feed_forward."}
    names |= {"ln1": "attention_norm", "ln2": "ffn_norm", "ln_final": "norm", "lm_head": "output"}
    weights = {}
    for name, tensor in _trained_model()[0].state_dict().items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        weights[name] = tensor
    return weights


def _damage_zip(data: bytes, choices: Choices) -> bytes:
    """Damage a file of torch.save: its pickle, another part, or the zip archive itself."""
    if choices.below(4) == 0:
        return mutate_bytes(data, choices)
    written = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as whole, zipfile.ZipFile(written, "w") as changed:
        names = whole.namelist()
        chosen = choices.pick([name for name in names if name.endswith("data.pkl")] * 3 + names)
        for name in names:
            part = whole.read(name)
            changed.writestr(name, mutate_bytes(part, choices) if name == chosen else part)
    return written.getvalue()


_ODD_TENSORS: list[Any] = [
    *(torch.zeros(4), torch.zeros(()), torch.zeros(4, 4, dtype=torch.int8), torch.zeros(0, 4)),
    *(torch.empty(4, 4, device="meta"), torch.zeros(4, dtype=torch.complex64), torch.zeros(1).expand(4, 4)),
    torch.zeros(4, 4).to_sparse(),
    *(torch.zeros(4, 4).half(), "text", None, [1], {}),
]  # fmt: skip


def _replace_part(part: Any, choices: Choices) -> Any:
    """Return another value for a part of a state dict."""
    if isinstance(part, torch.Tensor) and choices.below(2):
        if not is_plain_tensor(part) or not part.ndim:
            return choices.pick(_ODD_TENSORS)
        turned = part.mT if part.ndim > 1 else part[None]
        return choices.pick([part.double().to_sparse(), part[:1], part.double(), turned, part.int()])
    return choices.pick([*_ODD_TENSORS, 0, -1, 1 << 70, 1.5, float("nan"), True, "", (), [{}], {"state": 1}])


def _save_damaged(state: Any, choices: Choices) -> bytes:
    """Return a state written by torch.save, with damage in the state or in the file."""
    if choices.below(2):
        state = mutate(state, choices, 2, _replace_part)
        file = io.BytesIO()
        torch.save(state, file, _use_new_zipfile_serialization=choices.below(4) > 0 or _needs_zip_format(state))
        return file.getvalue()
    file = io.BytesIO()
    torch.save(state, file)
    return _damage_zip(file.getvalue(), choices)


def _needs_zip_format(state: Any) -> bool:
    """Return whether torch.save's older format cannot hold the state."""
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else ()
    is_odd = isinstance(state, torch.Tensor) and (state.is_sparse or state.is_quantized or state.is_meta)
    return is_odd or any(map(_needs_zip_format, parts))


def checkpoint_file(choices: Choices, folder: Path) -> None:
    """A single-file checkpoint, loaded into a model and an optimizer that fit the intact one."""
    state = torch.load(io.BytesIO(_single_file()), weights_only=True)
    (folder / "checkpoint.pt").write_bytes(_save_damaged(state, choices))
    model = TransformerLM(CONFIG)
    iteration = load_checkpoint(folder / "checkpoint.pt", model, AdamW(model.parameters()))
    assert isinstance(iteration, int)


def _damage_safetensors(data: bytes, choices: Choices) -> bytes:
    """Damage a safetensors file: its header, the length of its header, or any bytes."""
    (size,) = struct.unpack("<Q", data[:8])
    match choices.below(4):
        case 0:
            return mutate_bytes(data, choices)
        case 1:
            return struct.pack("<Q", choices.pick([0, size - 1, size + 1, 1 << 40, (1 << 64) - 1])) + data[8:]
        case _:
            header = json_bytes(mutate(json.loads(data[8 : 8 + size]), choices), choices)
            return struct.pack("<Q", len(header)) + header + data[8 + size :]


def checkpoint(choices: Choices, folder: Path) -> None:
    """A checkpoint directory whose checksums match the damage, as an attacker would make them."""
    files = dict(_checkpoint_files("ours"))
    description = json.loads(files.pop("checkpoint.json"))
    name = choices.pick([*files, ""])
    if name == "model.safetensors":
        files[name] = _damage_safetensors(files[name], choices)
    elif name:
        files[name] = _save_damaged(torch.load(io.BytesIO(files[name]), weights_only=True), choices)
    about = {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in files.items()}
    description |= {"files": about}
    description = description if name else mutate(description, choices)
    if isinstance(description, dict) and choices.below(8):
        description = {key: value for key, value in description.items() if key != "sha256"}
        digest = hashlib.sha256(json.dumps(description).encode()).hexdigest()
        files["checkpoint.json"] = json.dumps({**description, "sha256": digest}, indent=1).encode()
    else:
        files["checkpoint.json"] = json_bytes(description, choices)
    directory = folder / "step-5"
    directory.mkdir(exist_ok=True)
    for name, data in files.items():
        (directory / name).write_bytes(data)
    newest_checkpoint(folder)
    match choices.below(2):
        case 0:
            load_model(directory)
        case _:
            model = TransformerLM(CONFIG)
            load_training(directory, model, [AdamW(model.parameters())])


def meta(choices: Choices, folder: Path) -> None:
    """Meta's params.json and consolidated.NN.pth."""
    chosen = choices.below(3)
    params = json_bytes(mutate(PARAMS, choices), choices) if chosen != 1 else json.dumps(PARAMS).encode()
    (folder / "params.json").write_bytes(params)
    shard = io.BytesIO()
    torch.save(_meta_weights(), shard)
    data = _save_damaged(_meta_weights(), choices) if chosen else shard.getvalue()
    (folder / "consolidated.00.pth").write_bytes(data)
    load_meta(folder, 8)


def hugging_face(choices: Choices, folder: Path) -> None:
    """config.json and safetensors, in one file or with an index."""
    files = _checkpoint_files("hugging face")
    config, weights = json.loads(files["config.json"]), files["model.safetensors"]
    chosen = choices.below(4)
    config_bytes = json_bytes(mutate(config, choices), choices) if chosen in (0, 3) else files["config.json"]
    (folder / "config.json").write_bytes(config_bytes)
    is_indexed = choices.below(4) == 3
    name, other = ("part.safetensors", "model.safetensors")[:: 1 if is_indexed else -1]
    (folder / other).unlink(missing_ok=True)
    (folder / name).write_bytes(_damage_safetensors(weights, choices) if chosen in (1, 3) else weights)
    index = {"weight_map": {"model.norm.weight": "part.safetensors", "lm_head.weight": "part.safetensors"}}
    (folder / "model.safetensors.index.json").write_bytes(json_bytes(mutate(index, choices), choices))
    load_hugging_face(folder)


def torch_file(choices: Choices, folder: Path) -> None:
    """config.json and pytorch_model.bin, with a matrix in FP8."""
    files = _checkpoint_files("hugging face")
    tensors, name = load(files["model.safetensors"]), "model.layers.0.mlp.down_proj.weight"
    scales = torch.ones(choices.pick([(1, 1), (), (4, 1), (1, 4), (0, 1), (1 << 20,)]))
    tensors |= {name: tensors[name].to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}
    (folder / "pytorch_model.bin").write_bytes(_save_damaged(tensors, choices))
    (folder / "config.json").write_bytes(files["config.json"])
    load_hugging_face(folder)


def gguf(choices: Choices, folder: Path) -> None:
    """A GGUF file with other bytes, or with other lengths, kinds, ids and offsets."""
    data = bytearray(_gguf_file())
    if choices.below(4) == 0:
        data = bytearray(mutate_bytes(bytes(data), choices))
    for _ in range(choices.below(4)):
        # The fields before the tokens, the tokens, or the names and places of the tensors.
        end = choices.pick([24, 800, 5600, len(data)])
        position, number = choices.below(end), choices.pick([0, 1, 8, 9, 31, 255, 1 << 20, 1 << 31, 1 << 32, 1 << 63])
        odd = struct.pack("<Q", number)[: choices.pick([1, 4, 8])]
        data[position : position + len(odd)] = odd
    (folder / "model.gguf").write_bytes(data)
    load_external(folder / "model.gguf")


@cache
def _adapter_files() -> dict[str, bytes]:
    """Return the files of an adapter in peft's format, of two layers."""
    layers = random_adapter(_trained_model()[0], 2, ["q_proj", "w2"])
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        save_peft(StoredAdapter(layers, directory, CONFIG, 0.1), directory, directory, "")
        return {path.name: path.read_bytes() for path in directory.iterdir()}


def adapter(choices: Choices, folder: Path) -> None:
    """adapter_config.json and adapter_model.safetensors, read to be fused into their base or to be served beside it."""
    base, files = folder / "base", _adapter_files()
    if not base.exists():
        base.mkdir()
        for name in ("config.json", "model.safetensors"):
            (base / name).write_bytes(_checkpoint_files("hugging face")[name])
    config, weights = {**json.loads(files[CONFIG_FILE]), "base_model_name_or_path": "base"}, files[WEIGHTS_FILE]
    config |= choices.pick([{}, {}, {"use_rslora": True}, {"alpha_pattern": {"q_proj": 3}, "rank_pattern": {"w": 1}}])
    if choices.below(2):
        config = mutate(config, choices)
    match choices.below(4):
        case 0:
            weights = _damage_safetensors(weights, choices)
        case 1:
            tensors = load(weights)
            for _ in range(1 + choices.below(3)):
                shape = choices.pick([(2, 4), (4, 2), (0, 4), (4, 0), (1, 4), (4, 1), (4,), (), (3, 2, 4), (300, 4)])
                kind = choices.pick([torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn, torch.complex64])
                name = choices.pick([*tensors, *(key.replace("self_attn.q", "self_attn.k") for key in tensors), "x"])
                tensors[name] = torch.zeros(shape, dtype=kind)
            weights = save(tensors, {"base_sha256": ""} if choices.below(2) else None)
    (folder / CONFIG_FILE).write_bytes(json_bytes(config, choices))
    (folder / WEIGHTS_FILE).write_bytes(weights)
    if choices.below(2):
        model = load_any_model(folder)
        adapters_B = None
    else:
        layers = read_served_peft(folder, _trained_model()[0], base)
        model = prepare_for_inference(copy.deepcopy(_trained_model()[0]), adapters=[layers])
        adapters_B = torch.tensor([1, 0])
    with torch.inference_mode(), use_adapters(adapters_B):
        logits = model(torch.tensor([[1, 2], [1, 2]]))
    assert logits.shape == (2, 2, CONFIG.vocab_size)


def odd_tensors(choices: Choices, folder: Path) -> None:
    """Valid safetensors files with tensors of wrong dtypes and shapes."""
    shapes = [(257, 4), (4, 4), (2, 4), (4,), (), (0,), (4, 0)]
    kinds = [torch.float32, torch.float16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64]
    tensors = load(_checkpoint_files("hugging face")["model.safetensors"])
    for _ in range(choices.below(4)):
        tensors[choices.pick([*tensors, "x"])] = torch.zeros(choices.pick(shapes), dtype=choices.pick(kinds))
    (folder / "model.safetensors").write_bytes(save(tensors))
    (folder / "config.json").write_bytes(_checkpoint_files("hugging face")["config.json"])
    load_hugging_face(folder, 8)


@cache
def _job() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return json.loads(write_job(Path(folder)).read_text())


def job(choices: Choices, folder: Path) -> None:
    """The job file of a training."""
    (folder / "job.json").write_bytes(json_bytes(mutate(_job(), choices), choices))
    Job.read(folder / "job.json")
