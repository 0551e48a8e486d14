"""Random small models that transformers wrote: same logits, same greedy tokens, exact round trips."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lm.checkpoint.hugging_face.architectures import ARCHITECTURES
from lm.checkpoint.hugging_face.model_files import load_hugging_face, save_hugging_face
from lm.inference.config import SampleConfig
from lm.inference.engine import generate
from lm.inference.generation_request import Generation
from lm.model.config import ModelConfig, MoEConfig, Multipliers
from lm.model.transformer import TransformerLM
from tests.helpers.llamas import assert_same_logits, assert_same_weights
from tests.helpers.tokenizers import bytes_tokenizer

_TOKENIZER = bytes_tokenizer()
_SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # so that logits and greedy tokens vary
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3 |= {"original_max_position_embeddings": 32, "rope_theta": 5000.0}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 500.0}
_FOUR_LAYERS = {"num_hidden_layers": 4}
_THREE_QUARTERS = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.75}
_LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]}
_LONGROPE |= {"long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]}
_GRANITE = {"embedding_multiplier": 2.0, "attention_multiplier": 0.2, "residual_multiplier": 0.7}
_GRANITE |= {"logits_scaling": 3.0}
_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
_EXPERTS |= {"shared_expert_intermediate_size": 24}
_EVERY_THIRD = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
_GEMMA = {"sliding_window": 19, "query_pre_attn_scalar": 24, "num_hidden_layers": len(_EVERY_THIRD)}
_GEMMA |= {"tie_word_embeddings": False}
_GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
_PHI4 = {"hidden_size": 64, "head_dim": 16}
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 2": ("Llama", {"num_key_value_heads": 4}),
    "Llama 3.1": ("Llama", {"rope_parameters": _LLAMA3}),
    "Llama 3.2, tied": ("Llama", {"rope_parameters": _LLAMA3 | {"factor": 32.0}, "tie_word_embeddings": True}),
    "Llama, linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
    "SmolLM": (
        "Llama",
        {"num_attention_heads": 2, "head_dim": 16, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "Mistral with a window": ("Mistral", {"sliding_window": 256}),
    "Mistral": ("Mistral", {"sliding_window": None}),
    "Qwen2": ("Qwen2", {}),
    "Qwen2, tied, one kv head": ("Qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "Qwen2, llama3": ("Qwen2", {"rope_parameters": _LLAMA3}),
    "Qwen3": ("Qwen3", {"head_dim": 20, "tie_word_embeddings": True}),  # wider heads, as of the small models
    "Qwen3, narrow": ("Qwen3", {}),
    "Mistral, wide": ("Mistral", {"sliding_window": None, "head_dim": 10}),
    "Qwen3, llama3": ("Qwen3", {"rope_parameters": _LLAMA3}),
    "Qwen3, YaRN": ("Qwen3", {"rope_parameters": _YARN}),
    "Llama, YaRN with an attention factor": ("Llama", {"rope_parameters": _YARN | {"attention_factor": 0.8}}),
    "Llama, YaRN of DeepSeek": ("Llama", {"rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}}),
    "Llama, dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 500.0}}),
    "SmolLM3": ("SmolLM3", _FOUR_LAYERS),
    "SmolLM3 of pairs": ("SmolLM3", {"no_rope_layers": [1, 0], "rope_parameters": _YARN}),
    "Phi-3": ("Phi3", {}),
    "Phi-3 with a window": ("Phi3", {"sliding_window": 40}),
    "Mistral, short window": ("Mistral", {"sliding_window": 21}),
    "Granite": ("Granite", _GRANITE),
    "Granite of a Llama": ("Granite", {"attention_multiplier": 8**-0.5}),
    "OLMo 2": ("Olmo2", {}),
    "OLMo 2, narrow": ("Olmo2", {"head_dim": 6}),
    "Qwen2-MoE": ("Qwen2Moe", _EXPERTS),
    "Qwen2-MoE, dense first": ("Qwen2Moe", _EXPERTS | {"mlp_only_layers": [0], "norm_topk_prob": True}),
    "Gemma 2": ("Gemma2", _GEMMA),
    "Gemma 2 without soft-caps": ("Gemma2", _GEMMA | {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "Gemma 3": ("Gemma3Text", _GEMMA | {"num_hidden_layers": 7}),
    "Gemma 3, 4B": ("Gemma3Text", _GEMMA | {"rope_parameters": _GEMMA3_ROPE, "layer_types": _EVERY_THIRD}),
    "Gemma 3, local": ("Gemma3Text", _GEMMA | {"num_hidden_layers": 4}),
    "Phi-4-mini": ("Phi3", _PHI4 | {"rope_parameters": _THREE_QUARTERS, "tie_word_embeddings": True}),
    "Phi-4-mini, LongRoPE": (
        "Phi3",
        _PHI4 | {"rope_parameters": _THREE_QUARTERS | _LONGROPE, "original_max_position_embeddings": 64},
    ),
}


_QUICK = ("Llama 3.2, tied", "Mistral with a window", "Qwen2", "Qwen3", "SmolLM3", "Phi-4-mini")
_CASES = [pytest.param(name, marks=[] if name in _QUICK else [pytest.mark.slow]) for name in _FAMILIES]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Compute with one thread: models this small lose time to others."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_model(name: str, **options: Any) -> Any:
    """Return a random model of transformers, whose vectors are not the initial ones."""
    transformers = pytest.importorskip("transformers", reason="the reference")
    family, own = _FAMILIES[name]
    torch.manual_seed(5)
    config = getattr(transformers, f"{family}Config")(**_SHAPE | own | options)
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).eval()
    model.set_attn_implementation("eager")  # the only one with soft-caps
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("name", _CASES)
def test_a_family_computes_the_same(tmp_path: Path, name: str) -> None:
    """Same logits. If transformers, given our greedy text, finds each next token the likeliest, it writes the same."""
    theirs = make_model(name)
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    ours = load_hugging_face(tmp_path)
    assert_same_logits(ours, theirs)
    prompt = [7, 250, 31]
    count = min(200, ours.config.context_length - len(prompt))
    generation = Generation(prompt, count, SampleConfig(temperature=0))
    generate(ours, [generation])
    with torch.no_grad():
        logits = theirs(torch.tensor([prompt + generation.ids])).logits[0]
    assert logits.argmax(-1)[len(prompt) - 1 : -1].tolist() == generation.ids
    assert len({*generation.ids}) > 10, "a constant text would show little"


@pytest.mark.parametrize("name", _CASES)
def test_import_and_export_are_exact(tmp_path: Path, name: str) -> None:
    """Also in bfloat16, and for transformers as for us."""
    transformers = pytest.importorskip("transformers", reason="the reference")
    theirs = make_model(name)
    for dtype in (torch.float32, torch.bfloat16):
        theirs, directory = theirs.to(dtype), tmp_path / str(dtype)
        theirs.save_pretrained(directory / "theirs")
        ours = load_hugging_face(directory / "theirs")
        assert ours.head_weight.dtype == dtype
        save_hugging_face(ours, _TOKENIZER, directory / "ours")
        again = load_hugging_face(directory / "ours")
        assert again.config == ours.config
        assert_same_weights(again, ours)
        back = transformers.AutoModelForCausalLM.from_pretrained(directory / "ours", dtype="auto")
        if type(back) is type(theirs):  # a Phi-3 is a Llama with fused matrices, and is written as one
            weights = back.state_dict()
            assert theirs.state_dict().keys() == weights.keys()
            for key, weight in theirs.state_dict().items():
                assert weight.dtype == weights[key].dtype == dtype
                assert torch.equal(weight, weights[key]), key
        if dtype == torch.float32:
            assert_same_logits(again, back)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_a_missing_field_has_the_default_of_its_architecture(tmp_path: Path, model_type: str) -> None:
    transformers = pytest.importorskip("transformers", reason="the reference")
    theirs = transformers.AutoConfig.for_model(model_type, hidden_size=64, num_attention_heads=32)
    head_dim, architecture = getattr(theirs, "head_dim", None), ARCHITECTURES[model_type]
    experts = {
        "mixtral": MoEConfig(3, 2, d_expert=8),
        "qwen3_moe": MoEConfig(3, 2, d_expert=8),
        "qwen2_moe": MoEConfig(3, 2, d_expert=8, num_shared_experts=2, shared_gate=True),
        "glm4_moe": MoEConfig(3, 2, d_expert=8, num_shared_experts=1, affinity="sigmoid", aux_loss_weight=0.0),
    }
    more: dict[str, dict[str, Any]] = {
        "glm4_moe": {"rotary_fraction": 0.5, "head_dim": 4},
        "granite": {"multipliers": Multipliers(attention=1.0)},
        "gemma2": {"attention_softcap": 50.0, "logit_softcap": 30.0, "multipliers": Multipliers(8.0, 1 / 16)},
        "gemma3_text": {"multipliers": Multipliers(8.0, 1 / 16)},  # one layer, a local one
    }
    rope = theirs.rope_parameters
    options = {
        "vocab_size": _TOKENIZER.size,
        "context_length": theirs.max_position_embeddings,
        "d_model": 64,
        "num_layers": 1,
        "num_heads": 32,
        "num_kv_heads": theirs.num_key_value_heads,
        "head_dim": None if head_dim == 2 else head_dim,
        "d_ff": 8,
        "norm_eps": theirs.rms_norm_eps,
        "rope_theta": rope.get("sliding_attention", rope)["rope_theta"],
        "tied_embeddings": theirs.tie_word_embeddings,
        "sliding_window": theirs.sliding_window if "sliding_window" in architecture.stated else None,
        "moe": experts.get(model_type),
    }
    expected = ModelConfig(**options | architecture.options | more.get(model_type, {}))
    save_hugging_face(TransformerLM(expected), _TOKENIZER, tmp_path)
    content = json.loads((tmp_path / "config.json").read_text()) | {"model_type": model_type}
    names = {"rope_parameters", "rope_theta", "rope_local_base_freq", "layer_types", "tie_word_embeddings", "head_dim"}
    names |= {
        *architecture.defaults,
        "num_key_value_heads",
        "max_position_embeddings",
        "rms_norm_eps",
        "sliding_window",
    }
    for name in names - ({"head_dim"} if model_type == "glm4_moe" else set()):  # there, to have a rotated pair
        content.pop(name, None)
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert replace(load_hugging_face(tmp_path).config, moe=expected.moe) == expected


@pytest.mark.parametrize("name", _CASES)
def test_gradients_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    """Of the embedding, which all layers reach; each parameter has one that is not 0."""
    theirs = make_model(name, max_position_embeddings=48)
    theirs.save_pretrained(tmp_path)
    ours = load_hugging_face(tmp_path)
    ids = torch.randint(300, (2, 48), generator=torch.Generator().manual_seed(2))
    ours.loss(ids[:, :-1], ids[:, 1:]).backward()
    logits = theirs(ids[:, :-1]).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    expected = theirs.get_input_embeddings().weight.grad
    found = ours.token_embeddings.weight.grad
    assert found is not None
    torch.testing.assert_close(found, expected, atol=1e-4 * float(expected.abs().max()), rtol=0)
    for key, parameter in ours.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, key


@pytest.mark.parametrize(("name", "length"), [("Llama, dynamic", 400), ("Phi-4-mini, LongRoPE", 200)])
def test_frequencies_of_longer_texts_are_those_of_the_context(tmp_path: Path, name: str, length: int) -> None:
    """transformers computes them for each text by its length; ours are those of a text as long as the context."""
    theirs = make_model(name)
    theirs.save_pretrained(tmp_path)
    ours, short = load_hugging_face(tmp_path, length), load_hugging_face(tmp_path)
    assert_same_logits(ours, theirs)
    ids = torch.arange(short.config.context_length)[None]
    with torch.no_grad():
        assert not torch.allclose(short(ids), ours(ids), atol=1e-2)


def test_a_window_as_long_as_the_context_is_none(tmp_path: Path) -> None:
    make_model("Mistral with a window").save_pretrained(tmp_path)
    assert load_hugging_face(tmp_path).config.sliding_window is None
    assert load_hugging_face(tmp_path, 257).config.sliding_window == 256


def test_the_fields_of_transformers_4_are_read(tmp_path: Path) -> None:
    """It wrote rope_scaling and rope_theta, not rope_parameters."""
    theirs = make_model("Llama 3.1")
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    rope = content.pop("rope_parameters")
    content["rope_theta"] = rope.pop("rope_theta")
    path.write_text(json.dumps(content | {"rope_scaling": rope}))
    assert_same_logits(load_hugging_face(tmp_path), theirs)
