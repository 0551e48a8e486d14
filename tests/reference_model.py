"""The model as plain functions and loops over heads, queries and keys, and the settings of tests that draw inputs."""

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from lm.model import ModelConfig

FEW = settings(deadline=None, max_examples=25)
seeds = st.integers(0, 2**32 - 1)


def reference_rope(x: Tensor, theta: float, positions: Tensor) -> Tensor:
    """Meta's Llama: pairs of neighbours as complex numbers, each times exp(i · position · frequency)."""
    d_k = x.shape[-1]
    frequencies = 1.0 / (theta ** (torch.arange(0, d_k, 2)[: d_k // 2].double() / d_k))
    angles = positions.double()[..., None] * frequencies
    turns = torch.polar(torch.ones_like(angles), angles)
    pairs = torch.view_as_complex(x.double().reshape(*x.shape[:-1], -1, 2).contiguous())
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)


def reference_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + eps) * weight


def reference_attention(
    x: Tensor, weights: dict[str, Tensor], heads: int, theta: float | None, kv_heads: int = 0, eps: float = 0.0
) -> Tensor:
    """One sequence (T, D); every head and query in turn, looking at no later key. Heads in a row share keys and values;
    queries and keys are normed where there are weights for that."""
    length, d_model = x.shape
    width = d_model // heads
    outputs = torch.zeros_like(x)
    for head in range(heads):
        shared = head * (kv_heads or heads) // heads
        rows, shared_rows = (slice(i * width, (i + 1) * width) for i in (head, shared))
        q, k, v = (x @ weights[f"{name}_proj.weight"][rows if name == "q" else shared_rows].T for name in "qkv")
        if "q_norm.weight" in weights:
            q, k = (
                reference_rms_norm(part, weights[f"{name}_norm.weight"], eps) for part, name in ((q, "q"), (k, "k"))
            )
        if theta is not None:
            q, k = (reference_rope(part, theta, torch.arange(length)) for part in (q, k))
        for t in range(length):
            scores = torch.stack([q[t] @ k[s] for s in range(t + 1)]) / width**0.5
            outputs[t, rows] = sum(p * v[s] for s, p in enumerate(torch.softmax(scores, 0)))
    return outputs @ weights["output_proj.weight"].T


def reference_transformer(ids: Tensor, state: dict[str, Tensor], config: ModelConfig) -> Tensor:
    """One sequence of ids (T,) → logits (T, V), for every option of the config."""

    def norm(x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
        return reference_rms_norm(x, weights[f"{name}.weight"], config.norm_eps)

    def attend(x: Tensor, layer: dict[str, Tensor]) -> Tensor:
        attention = {key.removeprefix("attn."): value for key, value in layer.items() if key.startswith("attn.")}
        theta = config.rope_theta if config.positions == "rope" else None
        return reference_attention(x, attention, config.num_heads, theta, config.num_kv_heads or 0, config.norm_eps)

    def feed_forward(x: Tensor, layer: dict[str, Tensor]) -> Tensor:
        inner = x @ layer["ffn.w1.weight"].T
        if config.feed_forward == "relu2":
            inner = torch.where(inner > 0, inner**2, torch.zeros_like(inner))
        else:
            inner = inner / (1 + torch.exp(-inner))
        if config.feed_forward == "swiglu":
            inner = inner * (x @ layer["ffn.w3.weight"].T)
        return inner @ layer["ffn.w2.weight"].T

    x = state["token_embeddings.weight"][ids]
    for n in range(config.num_layers):
        layer = {
            key.removeprefix(f"layers.{n}."): value for key, value in state.items() if key.startswith(f"layers.{n}.")
        }
        if config.norm == "pre":
            x = x + attend(norm(x, layer, "ln1"), layer)
            x = x + feed_forward(norm(x, layer, "ln2"), layer)
        elif config.norm == "post":
            x = norm(x + attend(x, layer), layer, "ln1")
            x = norm(x + feed_forward(x, layer), layer, "ln2")
        else:
            x = x + attend(x, layer)
            x = x + feed_forward(x, layer)
    if config.norm == "pre":
        x = norm(x, state, "ln_final")
    logits = x @ state["token_embeddings.weight" if config.tied_embeddings else "lm_head.weight"].T
    if config.logit_softcap:
        logits = config.logit_softcap * torch.tanh(logits / config.logit_softcap)
    return logits
