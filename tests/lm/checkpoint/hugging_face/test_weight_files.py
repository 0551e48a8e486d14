"""The weights of Hugging Face's files in all their forms: files of torch.save, and FP8 with scales."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from lm.checkpoint.hugging_face.model_files import load_hugging_face, save_hugging_face
from lm.checkpoint.hugging_face.weight_files import DequantizedWeights
from lm.checkpoint.safe_load import assign_weights
from lm.common.errors import UserError
from lm.model.config import ModelConfig, MoEConfig
from lm.model.transformer import TransformerLM
from lm.text.pretokenize import END_OF_TEXT
from tasks.import_model import find_model_files
from tasks.runtime.store import Store
from tests.helpers.llamas import assert_same_weights
from tests.helpers.tokenizers import bytes_tokenizer

Q = "model.layers.0.self_attn.q_proj"


def write_model(directory: Path, **options: Any) -> TransformerLM:
    sizes = {"vocab_size": 257, "context_length": 16, "d_model": 16, "num_layers": 2, "num_heads": 2, "d_ff": 24}
    torch.manual_seed(1)
    model = TransformerLM(ModelConfig(**sizes | options)).eval()
    save_hugging_face(model, bytes_tokenizer([END_OF_TEXT]), directory)
    return model


def take_tensors(directory: Path) -> dict[str, Tensor]:
    """Return the tensors of a model, and delete their file."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    return tensors


def write_index(directory: Path, shards: dict[str, dict[str, Tensor]]) -> None:
    files = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc of Linux")
def test_no_tensor_stays_mapped_once_it_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, maps = write_model(tmp_path / "model"), []

    def assign_and_look(*args: Any) -> None:
        maps.append(Path("/proc/self/maps").read_text())
        assign_weights(*args)

    monkeypatch.setattr("lm.checkpoint.external_weights.assign_weights", assign_and_look)
    assert_same_weights(load_hugging_face(tmp_path / "model"), model)
    assert len(maps) == 1
    assert "model.safetensors" not in maps[0]


def test_one_file_of_torch_is_read(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    tensors = take_tensors(tmp_path / "model")
    for name, is_zip in (("pytorch_model.bin", True), ("pytorch_model.bin", False), ("pytorch_model.pth", True)):
        torch.save(tensors, tmp_path / "model" / name, _use_new_zipfile_serialization=is_zip)
        assert_same_weights(load_hugging_face(tmp_path / "model"), model)
        (tmp_path / "model" / name).unlink()


def test_indexed_files_of_torch_are_read(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    names = sorted(tensors := take_tensors(tmp_path / "model"))
    shards = {
        f"pytorch_model-0000{number + 1}-of-00002.bin": {name: tensors[name] for name in names[number::2]}
        for number in range(2)
    }
    for name, shard in shards.items():
        torch.save(shard, tmp_path / "model" / name)
    write_index(tmp_path / "model", shards)
    assert_same_weights(load_hugging_face(tmp_path / "model"), model)
    sources = [Path(file.url).name for file in find_model_files(tmp_path / "model", Store(str(tmp_path / "root")))]
    assert {*shards, "pytorch_model.bin.index.json"} <= {*sources}
    (tmp_path / "model" / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(UserError, match=r"pytorch_model-00002-of-00002\.bin does not exist"):
        load_hugging_face(tmp_path / "model")


def test_safetensors_come_first(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(b"damaged")
    assert_same_weights(load_hugging_face(tmp_path / "model"), model)
    sources = find_model_files(tmp_path / "model", Store(str(tmp_path / "root")))
    assert "model.safetensors" in {Path(file.url).name for file in sources}
    assert "pytorch_model.bin" not in {Path(file.url).name for file in sources}, "its digest changes no key"


class Hostile:
    """Runs code when it is read without care."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_a_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    tensors = take_tensors(tmp_path / "model")
    for is_zip in (True, False):
        torch.save(
            tensors | {"x": Hostile(tmp_path / "touched")},
            tmp_path / "model" / "pytorch_model.bin",
            _use_new_zipfile_serialization=is_zip,
        )
        with pytest.raises(UserError, match="holds objects that are not tensors or plain data and could run code"):
            load_hugging_face(tmp_path / "model")
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize(
    "content", [[torch.zeros(2)], {"model": {"a": torch.zeros(2)}}, {"a": torch.zeros(2, 2).to_sparse()}, 5]
)
def test_other_contents_are_refused(tmp_path: Path, content: Any) -> None:
    write_model(tmp_path / "model")
    take_tensors(tmp_path / "model")
    torch.save(content, tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin is not a model's weights"):
        load_hugging_face(tmp_path / "model")


def test_an_index_must_name_files_beside_it(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    take_tensors(tmp_path / "model")
    write_index(tmp_path / "model", {"../other.bin": {"a": torch.zeros(2)}})
    with pytest.raises(UserError, match=r"index\.json names '\.\./other\.bin'"):
        load_hugging_face(tmp_path / "model")


@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 9),
    block=st.tuples(st.integers(1, 10), st.integers(1, 10)),
    kind=st.sampled_from(["number", "one", "rows", "blocks"]),
    seed=st.integers(0, 1000),
)
def test_each_number_is_multiplied_by_its_scale(
    rows: int, columns: int, block: tuple[int, int], kind: str, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
    size = {"number": (rows, columns), "one": (rows, columns), "rows": (1, columns), "blocks": block}[kind]
    grid = (-(-rows // size[0]), -(-columns // size[1]))
    scales = torch.rand(grid, generator=generator) + 0.5
    stored = scales.reshape(()) if kind == "number" else scales
    name = "weight_scale_inv" if kind == "blocks" else "weight_scale"
    tensors = {"a.weight": weight, f"a.{name}": stored, "a.input_scale": torch.ones(()), "b": torch.ones(3)}
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [*block]}}
    found = DequantizedWeights(tensors, config, Path("model"))
    assert [*found] == ["a.weight", "b"] and len(found) == 2 and found["b"] is tensors["b"]
    dequantized = found["a.weight"]
    assert dequantized.dtype == torch.float32 and dequantized.shape == weight.shape
    for i in range(rows):
        for j in range(columns):
            scale = scales[i // size[0], j // size[1]]
            assert dequantized[i, j] == weight[i, j].float() * scale


def quantize(directory: Path, block: tuple[int, int]) -> dict[str, Tensor]:
    """Store the matrices of the layers in FP8, a scale for each block; return what they then stand for."""
    tensors, exact = load_file(directory / "model.safetensors"), {}
    for name, tensor in [*tensors.items()]:
        if tensor.ndim == 2 and ".layers." in name and not name.endswith("gate.weight"):
            grid = (-(-tensor.shape[0] // block[0]), -(-tensor.shape[1] // block[1]))
            scales, wide = torch.empty(grid), torch.empty_like(tensor)
            for i in range(grid[0]):
                for j in range(grid[1]):
                    place = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
                    scales[i, j] = tensor[place].abs().max() / 448
                    tensors[name] = tensors[name].clone()
                    tensors[name][place] /= scales[i, j]
                    wide[place] = scales[i, j]
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scales
            exact[name] = tensors[name].float() * wide
    save_file(tensors, directory / "model.safetensors")
    return exact


@pytest.mark.parametrize("moe", [None, MoEConfig(num_experts=2, top_k=1, normalized_gates=False, d_expert=24)])
def test_a_model_in_fp8_is_the_model_of_its_numbers(tmp_path: Path, moe: MoEConfig | None) -> None:
    model = write_model(tmp_path / "model", moe=moe, qk_norm=moe is not None)
    exact = quantize(tmp_path / "model", (16, 8))
    assert len(exact) >= 14
    path = tmp_path / "model" / "config.json"
    quantization = {"quant_method": "fp8", "weight_block_size": [16, 8], "activation_scheme": "dynamic"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}))
    loaded = load_hugging_face(tmp_path / "model")
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    save_hugging_face(loaded, bytes_tokenizer([END_OF_TEXT]), tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert all(again[name].equal(tensor) for name, tensor in exact.items())
    for name, weight in loaded.state_dict().items():
        assert (weight - model.state_dict()[name]).abs().max() <= model.state_dict()[name].abs().max() / 16


def test_blocks_are_of_128_unless_the_config_says(tmp_path: Path) -> None:
    write_model(tmp_path / "model", d_ff=200)
    exact = quantize(tmp_path / "model", (128, 128))
    loaded = load_hugging_face(tmp_path / "model")
    assert loaded.state_dict()["layers.0.ffn.w1.weight"].equal(exact["model.layers.0.mlp.gate_proj.weight"])


def with_scale(scale: Tensor) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: tensors | {f"{Q}.weight_scale_inv": scale}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_scale(torch.ones(2, 3)), r"weight_scale_inv has the shape \(2, 3\), which is neither one scale of"),
        (with_scale(torch.ones(1, 1, dtype=torch.int32)), r"weight_scale_inv is torch\.int32"),
        (with_scale(torch.full((1, 1), torch.nan)), "not finite"),
    ],
)
def test_scales_that_do_not_fit_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], message: str
) -> None:
    write_model(tmp_path / "model")
    quantize(tmp_path / "model", (128, 128))
    path = tmp_path / "model" / "model.safetensors"
    save_file(change(load_file(path)), path)
    with pytest.raises(UserError, match=message):
        load_hugging_face(tmp_path / "model")
