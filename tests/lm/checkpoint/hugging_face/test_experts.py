"""Import and export of mixtures of experts: equal to transformers' architectures, or refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lm.checkpoint.hugging_face.model_files import load_hugging_face, save_hugging_face
from lm.common.errors import UserError
from lm.model.config import MoEConfig
from tests.helpers.llamas import (
    assert_same_logits,
    assert_same_weights,
    make_exported,
)
from tests.helpers.tokenizers import make_tokenizer

_MOE_EXPORTS: dict[str, dict[str, Any]] = {
    "Mixtral": {"moe": MoEConfig(d_expert=24)},
    "Mixtral tied": {"moe": MoEConfig(num_experts=4, top_k=4), "tied_embeddings": True, "d_ff": 64},
    "Qwen3Moe": {"moe": MoEConfig(normalized_gates=False, num_dense_layers=1), "qk_norm": True},
    "Glm4Moe": {
        "moe": MoEConfig(
            affinity="sigmoid",
            num_shared_experts=2,
            d_expert=20,
            num_dense_layers=1,
            aux_loss_weight=0.0,
            bias_update_rate=1e-3,
        )
    },
    "Glm4Moe with QK-norm": {
        "moe": MoEConfig(affinity="sigmoid", num_shared_experts=1, d_expert=24, normalized_gates=False),
        "qk_norm": True,
    },
    "Glm4Moe with biases": {
        "moe": MoEConfig(affinity="sigmoid", num_shared_experts=1, d_expert=24),
        "qkv_bias": True,
    },
}


@pytest.mark.parametrize("name", _MOE_EXPORTS)
def test_experts_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers", reason="the reference")
    ours, _ = make_exported(tmp_path / "out", **_MOE_EXPORTS[name])
    for buffer_name, buffer in ours.named_buffers():
        if buffer_name.endswith("expert_bias"):
            buffer += torch.linspace(-0.3, 0.3, len(buffer))
    save_hugging_face(ours, make_tokenizer(), tmp_path / "biased")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "biased")
    assert type(theirs).__name__ == f"{name.split()[0]}ForCausalLM"
    assert_same_logits(ours, theirs)
    loaded = load_hugging_face(tmp_path / "biased")
    assert_same_logits(loaded, theirs)
    theirs.save_pretrained(tmp_path / "theirs")
    assert_same_weights(load_hugging_face(tmp_path / "theirs"), loaded)


def test_the_bias_of_experts_is_not_rounded(tmp_path: Path) -> None:
    ours, _ = make_exported(tmp_path / "out", **_MOE_EXPORTS["Glm4Moe"])
    for name, buffer in ours.named_buffers():
        if name.endswith("expert_bias"):
            buffer += torch.linspace(-0.3, 0.3, len(buffer))
    save_hugging_face(ours.bfloat16(), make_tokenizer(), tmp_path / "biased")
    loaded = load_hugging_face(tmp_path / "biased", dtype=torch.bfloat16)
    assert_same_weights(loaded, ours)
    assert {buffer.dtype for name, buffer in loaded.named_buffers() if name.endswith("bias")} == {torch.float32}


def test_the_auxiliary_loss_keeps_its_strength(tmp_path: Path) -> None:
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral", reason="the reference")
    make_exported(tmp_path / "out", moe=MoEConfig(num_experts=8, top_k=2, aux_loss_weight=0.03), num_layers=3)
    balanced = mixtral.load_balancing_loss_func(tuple(torch.zeros(3, 10, 8)), 8, 2)
    coefficient = json.loads((tmp_path / "out" / "config.json").read_text())["router_aux_loss_coef"]
    assert coefficient * float(balanced) == pytest.approx(0.03 * 3)  # ours is 1 in each of three blocks
    loaded = load_hugging_face(tmp_path / "out").config.moe
    assert loaded is not None and loaded.aux_loss_weight == 0.03


def test_a_file_whose_layers_are_all_dense_is_refused(tmp_path: Path) -> None:
    make_exported(tmp_path / "out", moe=MoEConfig(num_dense_layers=1), qk_norm=True)
    path = tmp_path / "out" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"mlp_only_layers": [0, 1]}))
    with pytest.raises(UserError, match=r"config\.json: all 2 layers are dense"):
        load_hugging_face(tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "moe", "name"),
    [
        ({}, {"num_shared_experts": 1}, "num_shared_experts 1"),
        ({"qk_norm": True}, {"num_shared_experts": 1}, "num_shared_experts 1"),
        ({}, {"bias_update_rate": 0.1}, r"bias_update_rate 0\.1"),
        ({}, {"normalized_gates": False}, "normalized_gates False"),
        ({}, {"num_dense_layers": 1}, "num_dense_layers 1"),
        ({}, {"affinity": "sigmoid"}, "num_shared_experts 0"),
    ],
)
def test_experts_that_no_architecture_has_are_refused(
    tmp_path: Path, options: dict[str, Any], moe: dict[str, Any], name: str
) -> None:
    with pytest.raises(UserError, match=rf"model\.moe\.{name} cannot be exported"):
        make_exported(tmp_path / "out", moe=MoEConfig(**moe), **options)


def test_files_without_all_experts_are_refused(tmp_path: Path) -> None:
    make_exported(tmp_path / "out", **_MOE_EXPORTS["Mixtral"])
    path = tmp_path / "out" / "model.safetensors"
    weights = load_file(path)
    del weights["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
    save_file(weights, path)
    with pytest.raises(UserError, match=r"experts of model\.layers\.1\.block_sparse_moe\.experts\.w2 are not complete"):
        load_hugging_face(tmp_path / "out")
