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


def reference_attention(x: Tensor, weights: dict[str, Tensor], heads: int, theta: float | None) -> Tensor:
    """One sequence (T, D); every head and query in turn, looking at no later key."""
    length, d_model = x.shape
    width = d_model // heads
    outputs = torch.zeros_like(x)
    for head in range(heads):
        rows = slice(head * width, (head + 1) * width)
        q, k, v = (x @ weights[f"{name}_proj.weight"][rows].T for name in "qkv")
        if theta is not None:
            q, k = (reference_rope(part, theta, torch.arange(length)) for part in (q, k))
        for t in range(length):
            scores = torch.stack([q[t] @ k[s] for s in range(t + 1)]) / width**0.5
            outputs[t, rows] = sum(p * v[s] for s, p in enumerate(torch.softmax(scores, 0)))
    return outputs @ weights["output_proj.weight"].T


def reference_transformer(ids: Tensor, state: dict[str, Tensor], config: ModelConfig) -> Tensor:
    """One sequence of ids (T,) → logits (T, V)."""
    x = state["token_embeddings.weight"][ids]
    for n in range(config.num_layers):
        layer = {
            key.removeprefix(f"layers.{n}."): value for key, value in state.items() if key.startswith(f"layers.{n}.")
        }
        attention = {key.removeprefix("attn."): value for key, value in layer.items() if key.startswith("attn.")}
        normed = reference_rms_norm(x, layer["ln1.weight"], config.norm_eps)
        x = x + reference_attention(normed, attention, config.num_heads, config.rope_theta)
        normed = reference_rms_norm(x, layer["ln2.weight"], config.norm_eps)
        gate, up = normed @ layer["ffn.w1.weight"].T, normed @ layer["ffn.w3.weight"].T
        x = x + (gate / (1 + torch.exp(-gate)) * up) @ layer["ffn.w2.weight"].T
    return reference_rms_norm(x, state["ln_final.weight"], config.norm_eps) @ state["lm_head.weight"].T
