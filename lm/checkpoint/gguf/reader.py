"""Load models from GGUF, the file format of llama.cpp: a Llama, a Qwen2 or a Qwen3, with dequantized weights."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lm.checkpoint.external_weights import (
    FieldTable,
    assemble_model,
    check_fixed_fields,
    pair_rotary_rows,
    read_field,
    read_model_config,
)
from lm.checkpoint.gguf.container import GGUFFile
from lm.checkpoint.gguf.tokenizer_metadata import parse_tokenizer
from lm.checkpoint.hugging_face.model_files import find_rotary
from lm.common.errors import UserError
from lm.model.config import ModelConfig, RopeScaling
from lm.model.rope import rotary_frequencies
from lm.model.transformer import TransformerLM
from lm.tokenizer.sentencepiece import SentencePieceTokenizer
from lm.tokenizer.tokenizer import Tokenizer

GGUF_NAMES = {
    "layers": "blk",
    "token_embeddings": "token_embd",
    "attn.q_proj": "attn_q",
    "attn.k_proj": "attn_k",
    "attn.v_proj": "attn_v",
    "attn.output_proj": "attn_output",
    "attn.q_norm": "attn_q_norm",
    "attn.k_norm": "attn_k_norm",
    "ffn.w1": "ffn_gate",
    "ffn.w2": "ffn_down",
    "ffn.w3": "ffn_up",
    "ln1": "attn_norm",
    "ln2": "ffn_norm",
    "ln_final": "output_norm",
    "lm_head": "output",
}
"""Names of modules, ours → GGUF's."""
ROTARY_DIVISORS = "rope_freqs.weight"
"""Name of the tensor by which each rotary frequency is divided, (K/2,): llama3's scaling."""
ADJACENT_PAIRS = {"llama": True, "qwen2": False, "qwen3": False}
"""Whether an architecture rotates adjacent pairs, as our models do, and not (i, i + K/2)."""
GGUF_FIELDS: FieldTable = {
    "embedding_length": ("d_model", None),
    "block_count": ("num_layers", None),
    "attention.head_count": ("num_heads", None),
    "attention.head_count_kv": ("num_kv_heads", None),
    "attention.key_length": ("head_dim", None),
    "feed_forward_length": ("d_ff", None),
    "context_length": ("context_length", None),
    "attention.layer_norm_rms_epsilon": ("norm_eps", 1e-5),
    "rope.freq_base": ("rope_theta", 10000.0),
}
"""Names in the metadata, after that of the architecture."""


def load_gguf(
    path: Path, max_seq_len: int | None = None, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> TransformerLM:
    """Load the model of a GGUF file in evaluation mode; its weights are dequantized.

    ``max_seq_len`` is the context length, by default that of the file. ``dtype`` defaults to that of the embedding, and
    to bfloat16 if it is quantized. Raises UserError if a field or a tensor is missing, damaged or does not fit the
    others, and for other architectures and features: experts, windows, other scalings of rotary positions.
    """
    file = GGUFFile(path)
    config, architecture = read_gguf_config(file, max_seq_len)
    if dtype is None:
        dtypes = {"F32": torch.float32, "F16": torch.float16}
        dtype = dtypes.get(file.stored["token_embd.weight"].type_name, torch.bfloat16)
    model = assemble_model(config, [file], GGUF_NAMES, path, device, dtype)
    if not ADJACENT_PAIRS[architecture]:
        is_rotary = find_rotary(model)
        for name, parameter in model.named_parameters():
            if is_rotary[name]:
                parameter.data = pair_rotary_rows(parameter.data, config)
    return model


def load_gguf_tokenizer(path: Path) -> Tokenizer | SentencePieceTokenizer:
    """Load the tokenizer of a GGUF file; see :func:`lm.checkpoint.gguf.tokenizer_metadata.parse_tokenizer`."""
    return parse_tokenizer(path, GGUFFile(path).metadata)


def read_gguf_config(file: GGUFFile, max_seq_len: int | None = None) -> tuple[ModelConfig, str]:
    """Return the config of the model in ``file``, and its architecture. Raises UserError as :func:`load_gguf` does."""
    path, metadata = file.path, file.metadata
    if (parts := metadata.get("split.count", 0)) not in (0, 1):
        raise UserError(f"{path} is one of {parts} files of a model; join them: llama-gguf-split --merge FIRST OUT")
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ADJACENT_PAIRS:
        raise UserError(
            f"{path}: general.architecture {architecture!r} is not supported; use a {' or a '.join(ADJACENT_PAIRS)}."
        )
    content = {
        name.removeprefix(f"{architecture}."): value
        for name, value in metadata.items()
        if name.startswith(f"{architecture}.")
    }
    embedding = file.stored.get("token_embd.weight")
    if embedding is None:
        raise UserError(f"{path} has no token_embd.weight; use a file with a whole model.")
    heads, width = content.get("attention.head_count"), content.get("embedding_length")
    if type(heads) is int and type(width) is int and heads and "attention.key_length" not in content:
        content["attention.key_length"] = width // heads
    content.setdefault("attention.head_count_kv", heads)
    if content.get("rope.scaling.type") == "none":
        del content["rope.scaling.type"]
    check_fixed_fields(
        path,
        content,
        {
            "expert_count": 0,
            "attention.sliding_window": 0,
            "attention.value_length": content.get("attention.key_length"),
            "rope.dimension_count": content.get("attention.key_length"),
            "rope.scaling.type": "linear",
        },
    )
    options: dict[str, Any] = {} if max_seq_len is None else {"context_length": max_seq_len}
    config = read_model_config(
        path,
        content,
        GGUF_FIELDS,
        vocab_size=embedding.shape[0],
        tied_embeddings="output.weight" not in file.stored,
        qkv_bias="blk.0.attn_q.bias" in file.stored,
        qk_norm=architecture == "qwen3",
        **options,
    )
    head_dim = None if config.head_dim == config.d_model / config.num_heads else config.head_dim
    return replace(config, head_dim=head_dim, rope_scaling=_read_rope_scaling(file, content, config)), architecture


def _read_rope_scaling(file: GGUFFile, content: dict[str, Any], config: ModelConfig) -> RopeScaling | None:
    """Return the scaling of rotary positions, None if there is none. Raises UserError if it is not one of ours."""
    if "rope.scaling.type" in content:
        try:
            return RopeScaling("linear", read_field(file.path, content, "rope.scaling.factor", 1.0))
        except UserError as error:
            raise UserError(f"{file.path} describes an unsupported model: {error}") from None
    if ROTARY_DIVISORS not in file.stored:
        return None
    theta, width = config.rope_theta, config.resolved_head_dim
    divisors = file[ROTARY_DIVISORS].float()
    if divisors.shape == (width // 2,):
        if bool((divisors == 1).all()):
            return None
        if scaling := find_llama3_scaling(divisors, theta, width):
            return scaling
    raise UserError(
        f"{file.path}: {ROTARY_DIVISORS} is not the scaling of Llama 3, the only one by divisors that textmill has; "
        "use the directory of safetensors of the same model."
    )


def find_llama3_scaling(divisors: Tensor, theta: float, head_dim: int) -> RopeScaling | None:
    """Return the scaling of the kind llama3 that divides each rotary frequency by ``divisors`` (K/2,), float32.

    None if there is none, or if fewer than two frequencies are blended. The share of a frequency f that is kept is
    ``(f · L / 2π - low) / (high - low)``: two of them determine the line, with low = 1 as in the published models.
    """
    frequencies, factor = rotary_frequencies(theta, head_dim), float(divisors.max())
    if not (1 < factor < math.inf):
        return None
    kept = (1 / divisors.double() - 1 / factor) / (1 - 1 / factor)
    is_blended = (kept > 1e-4) & (kept < 1 - 1e-4)
    if int(is_blended.sum()) < 2:
        return None
    f, k = frequencies[is_blended].double(), kept[is_blended]
    slope = float((k[0] - k[-1]) / (f[0] - f[-1]))  # L / 2π / (high - low)
    offset = slope * float(f[0]) - float(k[0])  # low / (high - low)
    if not (offset > 1e-6 and 1 <= (length := 2 * math.pi * slope / offset) < 1 << 40):
        return None
    scaling = RopeScaling("llama3", factor, 1.0, round(1 + 1 / offset, 3), round(length))
    found = frequencies / rotary_frequencies(theta, head_dim, scaling)
    return scaling if torch.allclose(found, divisors, rtol=1e-3, atol=0) else None
