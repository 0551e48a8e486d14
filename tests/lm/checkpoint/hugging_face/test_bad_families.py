"""Files of families that are refused: each message says which field of which file is at fault."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lm.checkpoint.hugging_face.model_files import load_hugging_face
from lm.common.errors import UserError
from lm.model.config import MoEConfig, Multipliers, RopeScaling
from tests.helpers.llamas import changed_config, make_exported

GEMMA: dict[str, Any] = {
    "model_type": "gemma3_text",
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
}
GEMMA_OPTIONS: dict[str, Any] = {
    "norm_placement": "sandwich",
    "feed_forward": "geglu",
    "zero_centered_norm": True,
    "sliding_window": 9,
}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (changed_config(rope_parameters={"rope_type": "yarn"}), "factor is missing; rope_type 'yarn' needs it"),
        (
            changed_config(rope_parameters={"rope_type": "yarn", "factor": 2.0, "truncate": False}),
            "truncate False is not supported",
        ),
        (
            changed_config(rope_parameters={"rope_type": "yarn", "factor": 2.0, "beta_fast": 0.5}),
            r"beta_fast 0\.5 must be above beta_slow 1\.0",
        ),
        (changed_config(rope_parameters={"rope_type": "longrope"}), "short_factor is None; rope_type 'longrope' needs"),
        (
            changed_config(rope_parameters={"rope_type": "longrope", "short_factor": [1.0]}),
            "divisors has 1 numbers; a head has 5 rotated pairs",
        ),
        (
            changed_config(rope_parameters={"rope_type": "longrope", "short_factor": [0] * 5}),
            "'longrope' has an unsupported field: .*divisors must be numbers above 0",
        ),
        (changed_config(model_type="smollm3", no_rope_layers=[1]), r"no_rope_layers is \[1\]; it must be a list"),
        (changed_config(model_type="smollm3", no_rope_layers=[0, 1]), r"no_rope_layers marks the layers \[0\]"),
        (changed_config(model_type="smollm3", no_rope_layer_interval=1), r"no_rope_layers marks the layers \[0, 1\]"),
        (
            changed_config(model_type="phi3", partial_rotary_factor=0.1),
            "rotary_fraction 0.1 of the head width 10",
        ),
        (changed_config(model_type="mistral", sliding_window=0), "sliding_window is 0; it must be a whole number"),
        (changed_config(**GEMMA, layer_types=["full_attention"] * 2), r"layer_types marks the layers \[0, 1\]"),
        (changed_config(**GEMMA, layer_types=["full_attention"]), "layer_types is .*; it must be a list"),
        (changed_config(**GEMMA, layer_types=["chunked_attention"] * 2), "layer_types has 'chunked_attention'"),
        (
            changed_config(**GEMMA, use_bidirectional_attention=True),
            "use_bidirectional_attention True",
        ),
        (changed_config(**GEMMA, query_pre_attn_scalar=0), "query_pre_attn_scalar is 0"),
        (changed_config(**GEMMA), r"has no model\.layers\.0\..*; use all files of one model"),
        (
            changed_config(**GEMMA, rope_parameters={"full_attention": {}, "sliding_attention": {"rope_type": "yarn"}}),
            "the rope_type of sliding_attention is not supported",
        ),
        (changed_config(model_type="granite", logits_scaling=0), "logits_divisor is 0.0; it must be above 0"),
        (
            changed_config(
                model_type="qwen2_moe",
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=8,
                shared_expert_intermediate_size=12,
            ),
            "shared_expert_intermediate_size 12 is no multiple of moe_intermediate_size 8",
        ),
    ],
)
def test_fields_that_are_not_supported_are_refused(tmp_path: Path, damage: Callable[[Path], Any], message: str) -> None:
    make_exported(tmp_path)
    damage(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        load_hugging_face(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rotary_fraction": 0.6, "qk_norm": True}, r"model\.rotary_fraction 0\.6 .*Qwen3 supports only 1\.0"),
        ({"rotary_fraction": 0.6, "rope_scaling": RopeScaling("linear")}, r"rotary_fraction 0\.6 .*Llama supports"),
        ({"sliding_window": 9, "qkv_bias": True}, r"model\.(qkv_bias|sliding_window) .* cannot be exported"),
        ({"norm_placement": "output"}, r"model\.norm_placement 'output' cannot be exported: Hugging Face's Llama"),
        ({"zero_centered_norm": True}, "model.zero_centered_norm True cannot be exported"),
        ({**GEMMA_OPTIONS}, "model.multipliers .*Gemma2 supports only embedding 6.3"),
        ({**GEMMA_OPTIONS, "multipliers": Multipliers(40**0.5, 0.3)}, "only an attention of 1 / sqrt"),
        ({**GEMMA_OPTIONS, "multipliers": Multipliers(40**0.5, 0.25), "sliding_window": None}, "sliding_window None"),
        (
            {"moe": MoEConfig(num_shared_experts=1, shared_gate=True, bias_update_rate=0.1), "qkv_bias": True},
            "bias_update_rate 0.1 cannot be exported: Hugging Face's Qwen2-MoE",
        ),
        ({"moe": MoEConfig(num_shared_experts=1, shared_gate=True)}, "model.qkv_bias False cannot .*Qwen2Moe supports"),
        (
            {"moe": MoEConfig(num_shared_experts=1, shared_gate=True, affinity="sigmoid", aux_loss_weight=0.0)},
            "shared_gate True cannot be exported: Hugging Face's GLM-4-MoE",
        ),
    ],
)
def test_options_that_no_family_has_together_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_exported(tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
