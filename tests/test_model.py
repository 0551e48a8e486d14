"""The whole model against independent references, and its config."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lm.errors import UserError
from lm.model import ModelConfig, TransformerLM, cross_entropy
from tests.reference_model import FEW, reference_transformer, seeds

CONFIG = ModelConfig(
    vocab_size=53, context_length=16, d_model=24, num_layers=2, num_heads=3, d_ff=40, rope_theta=500.0, norm_eps=1e-3
)


def tokens_for(config: ModelConfig, batch: int, length: int, seed: int = 0) -> Tensor:
    """Random token ids (batch, length)."""
    assert config.vocab_size is not None
    return torch.randint(config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def seeded_model(config: ModelConfig = CONFIG, seed: int = 0) -> TransformerLM:
    """A model whose norm weights are random too: all ones would hide a norm left out."""
    torch.manual_seed(seed)
    model = TransformerLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "ln" in name or "_norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model.eval()


VARIANTS: list[dict[str, Any]] = [
    {},
    {"num_heads": 6, "num_kv_heads": 2},
    {"num_heads": 6, "num_kv_heads": 1},
    {"tied_embeddings": True},
    {"qk_norm": True},
    {"logit_softcap": 12.0},
    {"zero_init_outputs": True},
    {"norm": "post"},
    {"norm": "none"},
    {"positions": "none"},
    {"feed_forward": "silu"},
    {"feed_forward": "relu2"},
    {
        "num_heads": 6,
        "num_kv_heads": 3,
        "tied_embeddings": True,
        "qk_norm": True,
        "norm": "post",
        "logit_softcap": 15.0,
    },
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_model_equals_plain_functions(variant: dict[str, Any]) -> None:
    config = replace(CONFIG, **variant)
    model = seeded_model(config)
    ids = tokens_for(config, 2, 12)
    state = {name: weight.double() for name, weight in model.state_dict().items()}
    expected = torch.stack([reference_transformer(row, state, config) for row in ids])
    torch.testing.assert_close(model(ids).double(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("feed_forward", ["swiglu", "relu2"])
def test_blocks_whose_outputs_start_at_zero_pass_their_input_on(feed_forward: str) -> None:
    model = seeded_model(replace(CONFIG, zero_init_outputs=True, feed_forward=feed_forward))  # type: ignore[arg-type]
    ids = tokens_for(CONFIG, 2, 12)
    torch.testing.assert_close(model(ids), model.logits(model.ln_final(model.token_embeddings(ids))))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_recomputed_activations_give_the_same_gradients(variant: dict[str, Any]) -> None:
    model = seeded_model(replace(CONFIG, **variant))
    ids = tokens_for(CONFIG, 2, 12)
    gradients = []
    for model.recomputes in (False, True):
        model.zero_grad()
        cross_entropy(model(ids), ids).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True) if a is not None and b is not None)
    assert all(gradient is not None for gradient in gradients[1])


def test_recomputing_keeps_less(monkeypatch: pytest.MonkeyPatch) -> None:
    model, kept = seeded_model(), []
    for model.recomputes in (False, True):
        sizes: dict[int, int] = {}
        keep = lambda tensor: sizes.update({tensor.data_ptr(): tensor.nbytes}) or tensor  # noqa: B023, E731
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(tokens_for(CONFIG, 2, 12))
        kept.append(sum(sizes.values()))
    assert kept[1] < kept[0] / 2


def test_model_equals_hugging_face_llama() -> None:
    """Hugging Face turns (i, i + d/2) and not neighbours, so the rows of q and k change places."""
    transformers = pytest.importorskip("transformers", reason="transformers is the reference here")
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=CONFIG.vocab_size,
            hidden_size=CONFIG.d_model,
            intermediate_size=CONFIG.d_ff,
            num_hidden_layers=CONFIG.num_layers,
            num_attention_heads=CONFIG.num_heads,
            num_key_value_heads=CONFIG.num_heads,
            max_position_embeddings=CONFIG.context_length,
            rms_norm_eps=CONFIG.norm_eps,
            rope_theta=CONFIG.rope_theta,
            # transformers 5 reads this, 4 the line above
            rope_parameters={"rope_type": "default", "rope_theta": CONFIG.rope_theta},
            tie_word_embeddings=False,
            attention_bias=False,
            hidden_act="silu",
        )
    ).eval()
    names = {
        "token_embeddings": "model.embed_tokens",
        "attn.output_proj": "self_attn.o_proj",
        "attn": "self_attn",
        "ffn.w1": "mlp.gate_proj",
        "ffn.w2": "mlp.down_proj",
        "ffn.w3": "mlp.up_proj",
        "ln1": "input_layernorm",
        "ln2": "post_attention_layernorm",
        "ln_final": "model.norm",
    }
    model = seeded_model()
    weights = {}
    for name, weight in model.state_dict().items():
        if "q_proj" in name or "k_proj" in name:
            rows = weight.unflatten(0, (CONFIG.num_heads, -1, 2))
            weight = rows.transpose(1, 2).flatten(0, 2)
        for ours, theirs in names.items():
            name = name.replace(ours, theirs) if f".{ours}." in f".{name}" else name
        weights[f"model.{name}" if name.startswith("layers.") else name] = weight
    llama.load_state_dict(weights)
    ids = tokens_for(CONFIG, 3, CONFIG.context_length)
    with torch.no_grad():
        torch.testing.assert_close(model(ids), llama(ids).logits, atol=1e-5, rtol=1e-4)


@FEW
@given(seeds, st.integers(1, 11), st.integers(1, 52))
def test_later_tokens_do_not_change_earlier_logits(seed: int, place: int, other: int) -> None:
    model = seeded_model()
    ids = tokens_for(CONFIG, 2, 12, seed)
    changed = ids.clone()
    changed[:, place] = (changed[:, place] + other) % 53
    with torch.no_grad():
        before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :place], after[:, :place], atol=1e-6, rtol=1e-6)
    assert (before[:, place] - after[:, place]).abs().max() > 1e-3


def test_prefix_has_the_same_logits() -> None:
    model = seeded_model()
    ids = tokens_for(CONFIG, 2, 16)
    with torch.no_grad():
        torch.testing.assert_close(model(ids[:, :5]), model(ids)[:, :5], atol=1e-5, rtol=1e-5)


def test_default_positions_count_from_zero() -> None:
    model = seeded_model()
    ids = tokens_for(CONFIG, 2, 9)
    positions = torch.arange(9)
    with torch.no_grad():
        expected = model(ids)
        torch.testing.assert_close(model(ids, positions), expected)
        torch.testing.assert_close(model(ids, positions.expand(2, 9)), expected)


def test_positions_are_each_sequence_own() -> None:
    model = seeded_model()
    ids = tokens_for(CONFIG, 2, 5)
    positions = torch.tensor([[0, 1, 2, 3, 4], [2, 3, 7, 11, 15]])
    with torch.no_grad():
        together = model(ids, positions)
        for n in range(2):
            torch.testing.assert_close(together[n], model(ids[n : n + 1], positions[n])[0], atol=1e-5, rtol=1e-5)
        assert not torch.allclose(together[1], model(ids)[1], atol=1e-3)


def test_shifting_all_positions_changes_nothing() -> None:
    model = seeded_model()
    ids = tokens_for(CONFIG, 2, 9)
    with torch.no_grad():
        torch.testing.assert_close(model(ids, torch.arange(9) + 7), model(ids), atol=1e-4, rtol=1e-4)


def test_state_dict_keys_are_the_documented_ones() -> None:
    expected = {"token_embeddings.weight", "ln_final.weight", "lm_head.weight"}
    for n in range(CONFIG.num_layers):
        expected |= {f"layers.{n}.attn.{part}_proj.weight" for part in ("q", "k", "v", "output")}
        expected |= {f"layers.{n}.ffn.{part}.weight" for part in ("w1", "w2", "w3")}
        expected |= {f"layers.{n}.{part}.weight" for part in ("ln1", "ln2")}
    model = TransformerLM(CONFIG)
    assert set(model.state_dict()) == expected == {name for name, _ in model.named_parameters()}


def test_every_parameter_gets_a_gradient() -> None:
    model = seeded_model().train()
    ids = tokens_for(CONFIG, 2, 9)
    cross_entropy(model(ids[:, :-1]), ids[:, 1:]).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_untrained_model_is_near_uniform() -> None:
    """At the start no token is much likelier than another: the loss is about log V, plus half the logits' variance."""
    torch.manual_seed(0)
    model = TransformerLM(
        ModelConfig(vocab_size=300, context_length=32, d_model=64, num_layers=2, num_heads=4, d_ff=128)
    )
    ids = torch.randint(300, (8, 33))
    with torch.no_grad():
        loss = cross_entropy(model(ids[:, :-1]), ids[:, 1:]).item()
    assert math.log(300) - 0.1 < loss < math.log(300) + 0.5


def test_device_and_dtype_reach_every_parameter() -> None:
    model = TransformerLM(CONFIG, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.bfloat16)}


# A user's mistakes


@pytest.mark.parametrize(
    "wrong",
    [
        {"vocab_size": 0},
        {"context_length": 0},
        {"d_model": 0},
        {"num_layers": 0},
        {"num_heads": 0},
        {"num_heads": -2},
        {"d_ff": 0},
        {"d_model": 100, "num_heads": 16},  # not a multiple
        {"d_model": 48, "num_heads": 16},  # heads 3 wide: an odd number has no pairs
        {"rope_theta": 0.0},
        {"rope_theta": -1.0},
        {"rope_theta": math.nan},
        {"norm_eps": -1e-5},
        {"num_kv_heads": 3},  # no divisor of 16
        {"logit_softcap": -1.0},
        {"norm": "both"},
        {"feed_forward": "gelu"},
    ],
    ids=str,
)
def test_bad_config_is_a_user_error(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        ModelConfig(**wrong)


def test_model_needs_a_vocabulary_size() -> None:
    with pytest.raises(UserError, match="vocab_size"):
        TransformerLM(ModelConfig())


def test_too_long_sequence_is_a_user_error() -> None:
    model = TransformerLM(CONFIG)
    assert model(tokens_for(CONFIG, 1, 16)).shape == (1, 16, 53)
    with pytest.raises(UserError, match=r"17 tokens.*16"):
        model(tokens_for(CONFIG, 1, 17))
