"""The model as plain functions with loops over heads, queries and keys, and the variants that tests compare."""

from typing import Any

import torch
from torch import Tensor

from lm.model.config import ModelConfig, Multipliers

SMALL_CONFIG = ModelConfig(
    vocab_size=53, context_length=16, d_model=24, num_layers=2, num_heads=3, d_ff=40, rope_theta=500.0, norm_eps=1e-3
)
MODEL_VARIANTS: list[dict[str, Any]] = [
    {},
    {"num_heads": 6, "num_kv_heads": 2},
    {"num_heads": 6, "num_kv_heads": 1},
    {"num_heads": 3, "num_kv_heads": 1, "head_dim": 10, "qk_norm": True},  # wider heads than d_model / heads
    {"d_model": 26, "num_heads": 4, "head_dim": 4, "position_encoding": "none"},  # narrower; 4 does not divide 26
    {"tied_embeddings": True},
    {"qk_norm": True},
    {"qkv_bias": True, "num_heads": 6, "num_kv_heads": 2},
    {"logit_softcap": 12.0},
    {"zero_init_residual": True},
    {"norm_placement": "post"},
    {"norm_placement": "none"},
    {"rotary_fraction": 0.5},
    {"num_layers": 3, "global_interval": 2, "global_rope": False},
    {"sliding_window": 5},
    {"num_layers": 3, "sliding_window": 3, "global_interval": 3, "local_rope_theta": 20.0, "num_kv_heads": 1},
    {"multipliers": Multipliers(3.0, 0.3, 0.6, 4.0)},
    {"multipliers": Multipliers(0.5, None, 2.0), "tied_embeddings": True},
    {"qk_norm": True, "qk_norm_per_head": False, "num_kv_heads": 1},
    {"zero_centered_norm": True, "qk_norm": True},
    {"attention_softcap": 0.3, "sliding_window": 4, "num_kv_heads": 1},
    {"value_residual": True, "num_heads": 6, "num_kv_heads": 2, "num_layers": 3, "qkv_bias": True},
    {"feed_forward": "geglu"},
    {"norm_placement": "output"},
    {"norm_placement": "sandwich", "multipliers": Multipliers(residual=0.7)},
    {"position_encoding": "none"},
    {"position_encoding": "none", "num_heads": 8, "num_kv_heads": 2, "qk_norm": True},  # heads 3 wide
    {"feed_forward": "silu"},
    {"feed_forward": "relu2"},
    {
        "num_heads": 6,
        "num_kv_heads": 3,
        "tied_embeddings": True,
        "qk_norm": True,
        "norm_placement": "post",
        "logit_softcap": 15.0,
    },
]


def reference_rope(x: Tensor, theta: float, positions: Tensor, fraction: float = 1.0) -> Tensor:
    """Rotate as Meta's Llama does: neighbours are a complex number, multiplied by exp(i · position · frequency)."""
    if fraction < 1:
        width = int(x.shape[-1] * fraction)
        return torch.cat((reference_rope(x[..., :width], theta, positions), x[..., width:]), -1)
    d_k = x.shape[-1]
    frequencies = 1.0 / (theta ** (torch.arange(0, d_k, 2)[: d_k // 2].double() / d_k))
    angles = positions.double()[..., None] * frequencies
    rotations = torch.polar(torch.ones_like(angles), angles)
    pairs = torch.view_as_complex(x.double().reshape(*x.shape[:-1], -1, 2).contiguous())
    return torch.view_as_real(pairs * rotations).flatten(-2).to(x.dtype)


def reference_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + eps) * weight


def reference_attention(
    x: Tensor,
    weights: dict[str, Tensor],
    heads: int,
    theta: float | None,
    kv_heads: int = 0,
    eps: float = 0.0,
    rotary_fraction: float = 1.0,
    window: int | None = None,
    softcap: float = 0.0,
    scale: float | None = None,
    first_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute causal attention for one sequence (T, D), head by head and query by query.

    Consecutive heads share keys and values. ``weights`` may have biases, and weights that normalize queries and keys.
    Return also the values of each head (heads, T, width), which later layers may take as ``first_values``.
    """
    length, width = len(x), len(weights["q_proj.weight"]) // heads
    outputs, all_values = x.new_zeros(length, heads * width), x.new_zeros(heads, length, width)
    for head in range(heads):
        kv_head = head * (kv_heads or heads) // heads
        rows, kv_rows = (slice(i * width, (i + 1) * width) for i in (head, kv_head))
        q, k, v = (x @ weights[f"{name}_proj.weight"][rows if name == "q" else kv_rows].T for name in "qkv")
        if "q_proj.bias" in weights:
            q, k, v = (
                q + weights["q_proj.bias"][rows],
                k + weights["k_proj.bias"][kv_rows],
                v + weights["v_proj.bias"][kv_rows],
            )
        if first_values is not None:
            own, other = weights["value_sum.weight"]
            v = own * v + other * first_values[head]
        all_values[head] = v
        if "q_norm.weight" in weights:
            q_gain, k_gain = weights["q_norm.weight"], weights["k_norm.weight"]
            q_size, k_size = q.square(), k.square()
            if len(q_gain) > width:  # of all heads together
                q_size, k_size = ((x @ weights[f"{name}_proj.weight"].T).square() for name in "qk")
                q_gain, k_gain = q_gain[rows], k_gain[kv_rows]
            q, k = (
                part / torch.sqrt(size.mean(-1, keepdim=True) + eps) * gain
                for part, size, gain in ((q, q_size, q_gain), (k, k_size, k_gain))
            )
        if theta is not None:
            q, k = (reference_rope(part, theta, torch.arange(length), rotary_fraction) for part in (q, k))
        for t in range(length):
            first = max(0, t + 1 - window) if window else 0
            scores = torch.stack([q[t] @ k[s] for s in range(first, t + 1)]) * (scale or width**-0.5)
            scores = softcap * torch.tanh(scores / softcap) if softcap else scores
            outputs[t, rows] = sum(p * v[s] for s, p in enumerate(torch.softmax(scores, 0), first))
    return outputs @ weights["output_proj.weight"].T, all_values


def reference_transformer(ids: Tensor, state: dict[str, Tensor], config: ModelConfig) -> Tensor:
    """Map one sequence of ids (T,) to logits (T, V), for every option of the config."""

    factors = config.multipliers or Multipliers()
    if config.zero_centered_norm:
        is_gain = {name: "norm" in name or ".ln" in name or name.startswith("ln") for name in state}
        state = {name: 1 + value if is_gain[name] else value for name, value in state.items()}

    def norm(x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
        return reference_rms_norm(x, weights[f"{name}.weight"], config.norm_eps)

    def attend(x: Tensor, layer: dict[str, Tensor]) -> Tensor:
        attention = {key.removeprefix("attn."): value for key, value in layer.items() if key.startswith("attn.")}
        theta = config.rope_theta if config.position_encoding == "rope" else None
        if is_global and not config.global_rope:
            theta = None
        elif not is_global and config.local_rope_theta:
            theta = config.local_rope_theta
        change, values = reference_attention(
            x,
            attention,
            config.num_heads,
            theta,
            config.num_kv_heads or 0,
            config.norm_eps,
            config.rotary_fraction,
            None if is_global else config.sliding_window,
            config.attention_softcap,
            factors.attention,
            next(iter(values_of_layers), None) if config.value_residual else None,
        )
        values_of_layers.append(values)
        return change

    def feed_forward(x: Tensor, layer: dict[str, Tensor]) -> Tensor:
        inner = x @ layer["ffn.w1.weight"].T
        if config.feed_forward == "relu2":
            inner = torch.where(inner > 0, inner**2, torch.zeros_like(inner))
        elif config.feed_forward == "geglu":
            inner = inner / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (inner + 0.044715 * inner**3)))
        else:
            inner = inner / (1 + torch.exp(-inner))
        if config.feed_forward in ("swiglu", "geglu"):
            inner = inner * (x @ layer["ffn.w3.weight"].T)
        return inner @ layer["ffn.w2.weight"].T

    values_of_layers: list[Tensor] = []
    x, add = factors.embedding * state["token_embeddings.weight"][ids], factors.residual
    for n in range(config.num_layers):
        is_global = config.global_interval is not None and (n + 1) % config.global_interval == 0
        layer = {
            key.removeprefix(f"layers.{n}."): value for key, value in state.items() if key.startswith(f"layers.{n}.")
        }
        if config.norm_placement == "pre":
            x = x + add * attend(norm(x, layer, "ln1"), layer)
            x = x + add * feed_forward(norm(x, layer, "ln2"), layer)
        elif config.norm_placement == "output":
            x = x + add * norm(attend(x, layer), layer, "ln1")
            x = x + add * norm(feed_forward(x, layer), layer, "ln2")
        elif config.norm_placement == "sandwich":
            x = x + add * norm(attend(norm(x, layer, "ln1"), layer), layer, "ln1_out")
            x = x + add * norm(feed_forward(norm(x, layer, "ln2"), layer), layer, "ln2_out")
        elif config.norm_placement == "post":
            x = norm(x + attend(x, layer), layer, "ln1")
            x = norm(x + feed_forward(x, layer), layer, "ln2")
        else:
            x = x + attend(x, layer)
            x = x + feed_forward(x, layer)
    if config.norm_placement not in ("post", "none"):
        x = norm(x, state, "ln_final")
    logits = x @ state["token_embeddings.weight" if config.tied_embeddings else "lm_head.weight"].T
    logits = logits / factors.logits_divisor
    if config.logit_softcap:
        logits = config.logit_softcap * torch.tanh(logits / config.logit_softcap)
    return logits
