"""Stage ``import``: the stored weights have the dtype of the files, and are trained in float32."""

from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from lm.checkpoint.external import exact_dtype
from lm.checkpoint.hugging_face.model_files import load_hugging_face, save_hugging_face
from lm.checkpoint.training_checkpoint import load_model, step_name
from lm.model.config import AdapterConfig
from lm.model.transformer import TransformerLM
from lm.text.pretokenize import END_OF_TEXT
from lm.train.frozen_base import FrozenBase, load_start
from tasks.import_model import find_model_files, import_model
from tests.helpers.generating import make_model
from tests.helpers.llamas import assert_same_weights
from tests.helpers.roots import materialize, run_context
from tests.helpers.tokenizers import bytes_tokenizer


def import_checkpoint(files: Path, root: Path) -> Path:
    """Import the model in ``files``; return its checkpoint."""
    run = run_context(root)
    ref = materialize(import_model, run, find_model_files(files, run.store))
    return ref.open(run.store).path(f"{step_name(0)}/checkpoint.json").parent


def write_model(directory: Path, dtype: torch.dtype) -> TransformerLM:
    model = make_model(257, 16).to(dtype).eval()
    save_hugging_face(model, bytes_tokenizer([END_OF_TEXT]), directory)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_weights_keep_their_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    model = write_model(tmp_path / "model", dtype)
    checkpoint = import_checkpoint(tmp_path / "model", tmp_path / "root")
    assert {tensor.dtype for tensor in load_file(checkpoint / "model.safetensors").values()} == {dtype}
    loaded = load_model(checkpoint)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    assert_same_weights(loaded, model.float())


def test_one_tensor_of_more_bits_makes_all_float32(tmp_path: Path) -> None:
    write_model(tmp_path / "model", torch.bfloat16)
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float() + 1e-6  # bfloat16 would round it
    save_file(tensors, file)
    loaded = load_model(import_checkpoint(tmp_path / "model", tmp_path / "root"))
    assert_same_weights(loaded, load_hugging_face(tmp_path / "model", dtype=torch.float32))
    assert torch.equal(loaded.state_dict()["ln_final.weight"], tensors["model.norm.weight"])


def test_of_a_directory_with_metas_files_they_are_read(tmp_path: Path) -> None:
    write_model(tmp_path, torch.bfloat16)
    assert exact_dtype(tmp_path) == torch.bfloat16
    (tmp_path / "params.json").touch()
    (tmp_path / "consolidated.00.pth").touch()
    assert exact_dtype(tmp_path) == torch.float32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "nf4"])
def test_an_adapter_has_the_base_of_a_model_that_was_imported_in_float32(
    tmp_path: Path, dtype: Literal["float32", "bfloat16", "nf4"]
) -> None:
    bases = []
    for bits in (16, 32):
        write_model(tmp_path / f"model-{bits}", torch.bfloat16)
        if bits == 32:
            file = tmp_path / "model-32" / "model.safetensors"
            save_file({name: tensor.float() for name, tensor in load_file(file).items()}, file)
        checkpoint = import_checkpoint(tmp_path / f"model-{bits}", tmp_path / f"root-{bits}")
        adapter = AdapterConfig(rank=2, dtype=dtype)
        torch.manual_seed(0)
        base = load_start(checkpoint, torch.device("cpu"), adapter)
        assert FrozenBase.adapt(base, checkpoint, adapter, 0.01)
        bases.append(base)
    assert_same_weights(*bases)
    inputs = torch.arange(8)[None]
    assert torch.equal(bases[0](inputs), bases[1](inputs))
