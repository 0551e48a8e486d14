"""Write models in GGUF, the file format of llama.cpp, with the library ``gguf``."""

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from lm.checkpoint.external_weights import check_is_expressible, translate_name, unpair_rotary_rows
from lm.checkpoint.gguf.reader import ADJACENT_PAIRS, GGUF_FIELDS, GGUF_NAMES, ROTARY_DIVISORS
from lm.checkpoint.gguf.tokenizer_metadata import add_tokenizer_metadata, check_tokenizer
from lm.checkpoint.hugging_face.model_files import find_rotary
from lm.common.errors import UserError, translate_write_errors
from lm.files.atomic_dir import sync_path
from lm.model.config import ModelConfig
from lm.model.rope import rotary_frequencies
from lm.model.transformer import TransformerLM
from lm.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from gguf import GGUFWriter

GGUFType = Literal["float32", "bfloat16", "q8_0"]

_TYPES = {  # of matrices and of the file, in gguf's words
    "float32": ("F32", "ALL_F32"),
    "bfloat16": ("BF16", "MOSTLY_BF16"),
    "q8_0": ("Q8_0", "MOSTLY_Q8_0"),
}
_BLOCK_SIZE = 32  # numbers of a row that share a scale in Q8_0
_EXPRESSIBLE_OPTIONS = {
    *(ours for ours, _ in GGUF_FIELDS.values()),
    *("vocab_size", "tied_embeddings", "qk_norm", "qkv_bias", "moe", "rope_scaling"),
    "zero_init_residual",  # decides the initial weights only
}


def save_gguf(model: TransformerLM, tokenizer: Tokenizer, path: Path, weight_type: GGUFType = "bfloat16") -> None:
    """Write a model and its tokenizer as one GGUF file for llama.cpp, atomically.

    A model with QK-norm becomes a ``qwen3``, one with biases a ``qwen2``, others a ``llama``. ``weight_type`` is the
    type of matrices; norms and biases are always float32. ``q8_0`` rounds blocks of 32 numbers to int8 with a float16
    scale. Tensors are converted and written one at a time. The file has the chat templates of the tokenizer and the ids
    that end a generation. Raises UserError if ``path`` exists, if llama.cpp lacks options of the model or of the
    tokenizer, see :func:`lm.checkpoint.gguf.tokenizer_metadata.check_tokenizer`, if rows do not fit ``q8_0``, if the
    library is missing, or if the file cannot be written.
    """
    try:
        from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType
        from gguf.quants import quant_shape_to_byte_shape, quantize
    except ImportError:
        raise UserError("Export to GGUF needs the gguf library: pip install 'textmill[gguf]'") from None
    path = path.absolute()
    with translate_write_errors(path):
        if path.exists():
            raise UserError(f"{path} already exists; name a new file.")
    config = model.config
    _check_model(config, weight_type)
    check_tokenizer(tokenizer, config.vocab_size or 0)
    with translate_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    architecture = _choose_architecture(config)
    matrix_type, file_type = _TYPES[weight_type]
    writer = GGUFWriter(temporary, architecture)
    writer.add_file_type(LlamaFileType[file_type])
    _add_model_metadata(writer, config, path.stem)
    add_tokenizer_metadata(writer, tokenizer, config.vocab_size or 0)
    is_rotary, tensors = find_rotary(model), []
    for key, weight in model.state_dict().items():
        is_reordered = not ADJACENT_PAIRS[architecture] and is_rotary.get(key, False)
        name = translate_name(key, GGUF_NAMES)
        tensors.append((name, weight, GGMLQuantizationType[matrix_type if weight.ndim > 1 else "F32"], is_reordered))
    if config.rope_scaling and config.rope_scaling.kind == "llama3":  # by what it divides each frequency (K/2)
        theta, width = config.rope_theta, config.resolved_head_dim
        divisors = rotary_frequencies(theta, width) / rotary_frequencies(theta, width, config.rope_scaling)
        tensors.append((ROTARY_DIVISORS, divisors, GGMLQuantizationType.F32, False))
    for name, weight, tensor_type, _ in tensors:
        num_bytes = math.prod(quant_shape_to_byte_shape(weight.shape, tensor_type))
        writer.add_tensor_info(name, weight.shape, np.dtype(np.float32), num_bytes, tensor_type)
    with translate_write_errors(path):
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for _, weight, tensor_type, is_reordered in tensors:
                if is_reordered:
                    weight = unpair_rotary_rows(weight, config)
                writer.write_tensor_data(quantize(weight.cpu().float().contiguous().numpy(), tensor_type))
            writer.close()
            sync_path(temporary)
            temporary.replace(path)
            sync_path(path.parent)
        finally:
            temporary.unlink(missing_ok=True)  # first: on a full disk, closing fails too
            writer.close()


def _choose_architecture(config: ModelConfig) -> str:
    """Return the architecture of llama.cpp that has the options of a model. Its ``llama`` has biases too, and alone the
    divisors of Llama 3; other programs know biases only of a ``qwen2``."""
    if config.qk_norm:
        return "qwen3"
    has_divisors = config.rope_scaling is not None and config.rope_scaling.kind == "llama3"
    return "qwen2" if config.qkv_bias and not has_divisors else "llama"


def _check_model(config: ModelConfig, weight_type: GGUFType) -> None:
    """Raise UserError for an option that GGUF's architectures lack, and for rows that do not fit q8_0."""
    if config.moe is not None:
        raise UserError(
            "A model with experts (model.moe) cannot be exported to GGUF. Export it for Hugging Face, without --gguf."
        )
    check_is_expressible(config, _EXPRESSIBLE_OPTIONS, "llama.cpp")
    all_heads = config.resolved_head_dim * config.num_heads
    scaling = config.rope_scaling.kind if config.rope_scaling else ""
    lacking = {
        f"model.rope_scaling {scaling}": scaling not in ("", "linear", "llama3"),
        "model.qk_norm and model.qkv_bias": config.qk_norm and config.qkv_bias,
        "model.qk_norm and model.rope_scaling llama3": config.qk_norm and scaling == "llama3",
        "model.qkv_bias and model.head_dim": config.qkv_bias and all_heads != config.d_model,
    }
    for options, is_set in lacking.items():
        if is_set:
            raise UserError(f"A model with {options} cannot be exported to GGUF: llama.cpp has no such model.")
    widths = {name: getattr(config, name) for name in ("d_model", "d_ff")}
    widths["head_dim · num_heads"] = all_heads
    for name, width in widths.items():
        if weight_type == "q8_0" and width % _BLOCK_SIZE:
            raise UserError(
                f"model.{name} {width} is not a multiple of {_BLOCK_SIZE}, the block of q8_0; "
                "export float32 or bfloat16."
            )


def _add_model_metadata(writer: "GGUFWriter", config: ModelConfig, name: str) -> None:
    from gguf import RopeScalingType

    writer.add_name(name)
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.d_model)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.d_ff)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.resolved_head_dim)
    writer.add_value_length(config.resolved_head_dim)
    writer.add_rope_dimension_count(config.resolved_head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    if config.rope_scaling and config.rope_scaling.kind == "linear":  # llama3's is a tensor
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_scaling.factor)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab_size or 0)
