"""The whole model against independent references."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lm.common.errors import UserError
from lm.common.execution import Execution
from lm.distributed.plan import parallelize
from lm.model.config import ModelConfig, MoEConfig
from lm.model.functional import IGNORE_INDEX, cross_entropy
from lm.model.rope import RotaryEmbedding
from lm.model.transformer import TransformerBlock, TransformerLM
from tests.helpers.reference_model import MODEL_VARIANTS, SMALL_CONFIG, reference_transformer
from tests.helpers.tensors import FEW_EXAMPLES, random_normal, seeds


def tokens_for(config: ModelConfig, batch: int, length: int, seed: int = 0) -> Tensor:
    """Draw random token ids (batch, length)."""
    assert config.vocab_size is not None
    return torch.randint(config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def seeded_model(config: ModelConfig = SMALL_CONFIG, seed: int = 0) -> TransformerLM:
    """Make a model with random norm weights and biases. Their initial values would hide that one is missing."""
    torch.manual_seed(seed)
    model = TransformerLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "ln" in name or "_norm" in name or "_sum" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith(".bias"):
                parameter.uniform_(-1, 1)
    return model.eval()


@pytest.mark.parametrize("variant", MODEL_VARIANTS, ids=str)
def test_model_equals_reference(variant: dict[str, Any]) -> None:
    config = replace(SMALL_CONFIG, **variant)
    model = seeded_model(config)
    ids = tokens_for(config, 2, 12)
    state = {name: weight.double() for name, weight in model.state_dict().items()}
    expected = torch.stack([reference_transformer(row, state, config) for row in ids])
    torch.testing.assert_close(model(ids).double(), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_model_that_is_cast_keeps_its_buffers(dtype: torch.dtype) -> None:
    """Rotary tables and the experts' bias are float32, moved with the model and not rounded."""
    config = replace(SMALL_CONFIG, moe=MoEConfig(num_experts=4, top_k=4, bias_update_rate=0.1))
    model, ids = seeded_model(config), tokens_for(config, 2, 12)
    layers: Any = model.layers
    for layer in layers:
        layer.ffn.expert_bias.fill_(1 / 3)
    expected, logits = {name: x.clone() for name, x in model.named_buffers()}, model(ids)
    model.to(dtype)
    torch.testing.assert_close(dict(model.named_buffers()), expected, rtol=0, atol=0)
    assert len(expected) > 2 and model(ids).dtype == dtype
    torch.testing.assert_close(model(ids).float(), logits, rtol=0.1, atol=0.1)
    assert {x.device.type for x in model.to("meta").buffers()} == {"meta"}


def test_no_rotary_table_without_rope(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lm.model.transformer.RotaryEmbedding", lambda *_: pytest.fail("a table was built"))
    model = seeded_model(replace(SMALL_CONFIG, position_encoding="none"))
    assert list(model.buffers()) == []


@pytest.mark.parametrize("feed_forward", ["swiglu", "relu2"])
def test_zero_initialized_blocks_are_the_identity(feed_forward: str) -> None:
    model = seeded_model(replace(SMALL_CONFIG, zero_init_residual=True, feed_forward=feed_forward))  # type: ignore[arg-type]
    ids = tokens_for(SMALL_CONFIG, 2, 12)
    torch.testing.assert_close(model(ids), model.logits(model.ln_final(model.token_embeddings(ids))))


@pytest.mark.parametrize("variant", MODEL_VARIANTS, ids=str)
def test_activation_checkpointing_gives_the_same_gradients(variant: dict[str, Any]) -> None:
    model = seeded_model(replace(SMALL_CONFIG, **variant))
    ids = tokens_for(SMALL_CONFIG, 2, 12)
    gradients = []
    for has_checkpointing in (False, True):
        parallelize(model, Execution(activation_checkpointing=has_checkpointing), "none")
        model.zero_grad()
        cross_entropy(model(ids), ids).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True) if a is not None and b is not None)
    assert all(gradient is not None for gradient in gradients[1])


def test_activation_checkpointing_saves_fewer_bytes() -> None:
    model, saved_bytes = seeded_model(), []
    for has_checkpointing in (False, True):
        parallelize(model, Execution(activation_checkpointing=has_checkpointing), "none")
        sizes: dict[int, int] = {}
        record = lambda tensor: sizes.update({tensor.data_ptr(): tensor.nbytes}) or tensor  # noqa: B023, E731
        with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
            model(tokens_for(SMALL_CONFIG, 2, 12))
        saved_bytes.append(sum(sizes.values()))
    assert saved_bytes[1] < saved_bytes[0] / 2


def test_model_equals_hugging_face_llama() -> None:
    """Hugging Face rotates the pairs (i, i + d/2) instead of neighbours, so the rows of q and k are permuted."""
    transformers = pytest.importorskip("transformers", reason="transformers is the reference")
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=SMALL_CONFIG.vocab_size,
            hidden_size=SMALL_CONFIG.d_model,
            intermediate_size=SMALL_CONFIG.d_ff,
            num_hidden_layers=SMALL_CONFIG.num_layers,
            num_attention_heads=SMALL_CONFIG.num_heads,
            num_key_value_heads=SMALL_CONFIG.num_heads,
            max_position_embeddings=SMALL_CONFIG.context_length,
            rms_norm_eps=SMALL_CONFIG.norm_eps,
            rope_theta=SMALL_CONFIG.rope_theta,
            # read by transformers 5; version 4 reads the line above
            rope_parameters={"rope_type": "default", "rope_theta": SMALL_CONFIG.rope_theta},
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
            rows = weight.unflatten(0, (SMALL_CONFIG.num_heads, -1, 2))
            weight = rows.transpose(1, 2).flatten(0, 2)
        for name_here, name_there in names.items():
            name = name.replace(name_here, name_there) if f".{name_here}." in f".{name}" else name
        weights[f"model.{name}" if name.startswith("layers.") else name] = weight
    llama.load_state_dict(weights)
    ids = tokens_for(SMALL_CONFIG, 3, SMALL_CONFIG.context_length)
    with torch.no_grad():
        torch.testing.assert_close(model(ids), llama(ids).logits, atol=1e-5, rtol=1e-4)


@FEW_EXAMPLES
@given(seeds, st.integers(1, 11), st.integers(1, 52))
def test_later_tokens_do_not_change_earlier_logits(seed: int, place: int, other: int) -> None:
    model = seeded_model()
    ids = tokens_for(SMALL_CONFIG, 2, 12, seed)
    changed = ids.clone()
    changed[:, place] = (changed[:, place] + other) % 53
    with torch.no_grad():
        before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :place], after[:, :place], atol=1e-6, rtol=1e-6)
    assert (before[:, place] - after[:, place]).abs().max() > 1e-3


def test_prefix_has_the_same_logits() -> None:
    model = seeded_model()
    ids = tokens_for(SMALL_CONFIG, 2, 16)
    with torch.no_grad():
        torch.testing.assert_close(model(ids[:, :5]), model(ids)[:, :5], atol=1e-5, rtol=1e-5)


def test_default_positions_count_from_zero() -> None:
    model = seeded_model()
    ids = tokens_for(SMALL_CONFIG, 2, 9)
    positions = torch.arange(9)
    with torch.no_grad():
        expected = model(ids)
        torch.testing.assert_close(model(ids, positions), expected)
        torch.testing.assert_close(model(ids, positions.expand(2, 9)), expected)


def test_positions_can_differ_between_sequences() -> None:
    model = seeded_model()
    ids = tokens_for(SMALL_CONFIG, 2, 5)
    positions = torch.tensor([[0, 1, 2, 3, 4], [2, 3, 7, 11, 15]])
    with torch.no_grad():
        batch_logits = model(ids, positions)
        for n in range(2):
            torch.testing.assert_close(batch_logits[n], model(ids[n : n + 1], positions[n])[0], atol=1e-5, rtol=1e-5)
        assert not torch.allclose(batch_logits[1], model(ids)[1], atol=1e-3)


def test_shifting_all_positions_changes_nothing() -> None:
    model = seeded_model()
    ids = tokens_for(SMALL_CONFIG, 2, 9)
    with torch.no_grad():
        torch.testing.assert_close(model(ids, torch.arange(9) + 7), model(ids), atol=1e-4, rtol=1e-4)


def test_state_dict_keys_are_the_documented_ones() -> None:
    expected = {"token_embeddings.weight", "ln_final.weight", "lm_head.weight"}
    for n in range(SMALL_CONFIG.num_layers):
        expected |= {f"layers.{n}.attn.{part}_proj.weight" for part in ("q", "k", "v", "output")}
        expected |= {f"layers.{n}.ffn.{part}.weight" for part in ("w1", "w2", "w3")}
        expected |= {f"layers.{n}.{part}.weight" for part in ("ln1", "ln2")}
    model = TransformerLM(SMALL_CONFIG)
    assert set(model.state_dict()) == expected == {name for name, _ in model.named_parameters()}


def test_every_parameter_gets_a_gradient() -> None:
    model = seeded_model().train()
    ids = tokens_for(SMALL_CONFIG, 2, 9)
    cross_entropy(model(ids[:, :-1]), ids[:, 1:]).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_untrained_model_is_near_uniform() -> None:
    """The loss is about log V plus half the variance of the logits."""
    torch.manual_seed(0)
    model = TransformerLM(
        ModelConfig(vocab_size=300, context_length=32, d_model=64, num_layers=2, num_heads=4, d_ff=128)
    )
    ids = torch.randint(300, (8, 33))
    with torch.no_grad():
        loss = cross_entropy(model(ids[:, :-1]), ids[:, 1:]).item()
    assert math.log(300) - 0.1 < loss < math.log(300) + 0.5


def test_device_and_dtype_reach_every_parameter() -> None:
    model = TransformerLM(SMALL_CONFIG, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.bfloat16)}


def test_model_loss_skips_ignored_targets() -> None:
    torch.manual_seed(0)
    model = TransformerLM(ModelConfig(97, 64, 32, 1, 2, d_ff=64))
    ids, targets = torch.randint(97, (2, 4, 64)).unbind()
    targets[:2], targets[3, 5:] = IGNORE_INDEX, IGNORE_INDEX
    torch.testing.assert_close(model.loss(ids, targets), cross_entropy(model(ids), targets))
    check_that_nothing_is_learned(model, model.loss, ids)


def check_that_nothing_is_learned(model: TransformerLM, loss_function: Callable[..., Any], ids: torch.Tensor) -> None:
    """Without any target."""
    loss = loss_function(ids, torch.full_like(ids, IGNORE_INDEX))
    loss.backward()
    assert loss == 0
    assert not any(parameter.grad.any() for parameter in model.parameters() if parameter.grad is not None)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_model_loss_under_autocast_is_near_the_loss_of_the_logits(softcap: float) -> None:
    torch.manual_seed(0)
    model = TransformerLM(ModelConfig(97, 64, 32, 2, 2, d_ff=64, logit_softcap=softcap))
    ids, targets = torch.randint(97, (2, 4, 64)).unbind()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.loss(ids, targets)
        reference = F.cross_entropy(model(ids).flatten(0, 1).float(), targets.flatten())
    for each_loss in (loss, reference):
        each_loss.backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, reference, rtol=1e-3, atol=1e-3)
    mean_gradients = [parameter.grad / 2 for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    model.loss(ids, targets).backward()  # in float32
    for mean, exact in zip(mean_gradients, (parameter.grad for parameter in model.parameters()), strict=True):
        assert exact is not None
        assert (mean - exact).norm() < 0.05 * exact.norm() + 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.long), True])
def test_compiled_model_loss_has_the_same_gradients(tied: bool) -> None:
    torch.manual_seed(0)
    model = TransformerLM(ModelConfig(97, 64, 32, 1, 2, d_ff=64, tied_embeddings=tied, qk_norm=True))
    ids, targets = torch.randint(97, (2, 4, 64)).unbind()
    targets[:2], targets[3, 5:] = IGNORE_INDEX, IGNORE_INDEX
    results = []
    compiled = torch.compile(model.loss)
    for loss_function in (model.loss, compiled):
        loss = loss_function(ids, targets)
        loss.backward()
        results.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
        model.zero_grad()
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-6)
    check_that_nothing_is_learned(model, compiled, ids)


def test_block_adds_attention_then_feed_forward() -> None:
    torch.manual_seed(0)
    block = TransformerBlock(ModelConfig(d_model=16, num_heads=2, d_ff=24), RotaryEmbedding(100.0, 8, 5))
    x = random_normal(2, 5, 16)
    middle = x + block.attn(block.ln1(x))
    torch.testing.assert_close(block(x), middle + block.ffn(block.ln2(middle)))


def test_model_needs_a_vocabulary_size() -> None:
    with pytest.raises(UserError, match="vocab_size"):
        TransformerLM(ModelConfig())


def test_too_long_sequence_is_a_user_error() -> None:
    model = TransformerLM(SMALL_CONFIG)
    assert model(tokens_for(SMALL_CONFIG, 1, 16)).shape == (1, 16, 53)
    with pytest.raises(UserError, match=r"17 tokens.*16"):
        model(tokens_for(SMALL_CONFIG, 1, 17))
