"""Write models in GGUF, the file format of llama.cpp, with the library ``gguf``."""

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from lm.checkpoint.external_weights import check_is_expressible, translate_name, unpair_rotary_rows
from lm.checkpoint.hugging_face import find_rotary
from lm.checkpoint.hugging_face_architectures import ARCHITECTURES
from lm.common.errors import UserError, translate_write_errors
from lm.data.chat_template import END_TOKEN, find_template
from lm.files.atomic_dir import sync_path
from lm.model.config import ModelConfig
from lm.model.rope import rotary_frequencies
from lm.model.transformer import TransformerLM
from lm.text.patterns import PATTERNS
from lm.text.pretokenize import Pattern
from lm.tokenizer.formats.vocab_merges import bytes_to_unicode, format_vocab
from lm.tokenizer.text_tokenizer import find_text_ends
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
_OPTIONS = {  # of a model, that its llama or its qwen3 has
    *("d_model", "num_layers", "num_heads", "num_kv_heads", "head_dim", "d_ff", "vocab_size", "context_length"),
    *("norm_eps", "rope_theta", "rope_scaling", "tied_embeddings", "qk_norm", "qkv_bias", "zero_init_residual"),
}
# llama.cpp's pretokenizer of each pattern, without and with ignore_merges.
_PRETOKENIZERS: dict[tuple[Pattern, bool], str] = {
    (PATTERNS["gpt2"], False): "gpt-2",
    (PATTERNS["llama3"], False): "smaug-bpe",
    (PATTERNS["llama3"], True): "llama-bpe",
    (PATTERNS["qwen2"], False): "qwen2",
    (PATTERNS["deepseek"], False): "deepseek-v3",
}


def save_gguf(model: TransformerLM, tokenizer: Tokenizer, path: Path, weight_type: GGUFType = "bfloat16") -> None:
    """Write a model and its tokenizer as one GGUF file for llama.cpp, atomically.

    A model with QK-norm becomes a ``qwen3``, others a ``llama``. ``weight_type`` is the type of matrices; norms and
    biases are always float32. ``q8_0`` rounds blocks of 32 numbers to int8 with a float16 scale. Tensors are converted
    and written one at a time. If the tokenizer has the tokens of the chat template, the file holds it. Raises UserError
    if ``path`` exists, if llama.cpp lacks options of the model or the pattern of the tokenizer, if the tokenizer has no
    special token, no merge or more ids than the model, if rows do not fit ``q8_0``, if the library is missing, or if
    the file cannot be written.
    """
    try:
        from gguf import (
            MODEL_ARCH,
            MODEL_ARCH_NAMES,
            GGMLQuantizationType,
            GGUFWriter,
            LlamaFileType,
            get_tensor_name_map,
        )
        from gguf.quants import quant_shape_to_byte_shape, quantize
    except ImportError:
        raise UserError("Export to GGUF needs the gguf library: pip install 'textmill[gguf]'") from None
    path = path.absolute()
    with translate_write_errors(path):
        if path.exists():
            raise UserError(f"{path} already exists; name a new file.")
    config = model.config
    _check_model(config, weight_type)
    _check_tokenizer(tokenizer, config)
    with translate_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    architecture = MODEL_ARCH.QWEN3 if config.qk_norm else MODEL_ARCH.LLAMA
    names = get_tensor_name_map(architecture, config.num_layers)
    matrix_type, file_type = _TYPES[weight_type]
    writer = GGUFWriter(temporary, MODEL_ARCH_NAMES[architecture])
    writer.add_file_type(LlamaFileType[file_type])
    _add_model_metadata(writer, config, path.stem)
    _add_tokenizer_metadata(writer, tokenizer, config)
    is_rotary, tensors = find_rotary(model), []
    for key, weight in model.state_dict().items():
        # llama.cpp's qwen3 rotates the pairs (i, i + K/2); its llama rotates adjacent pairs, as we do.
        is_reordered = config.qk_norm and is_rotary.get(key, False)
        name = names.get_name(translate_name(key, ARCHITECTURES["llama"].module_names), (".weight", ".bias")) or key
        tensors.append((name, weight, GGMLQuantizationType[matrix_type if weight.ndim > 1 else "F32"], is_reordered))
    if config.rope_scaling and config.rope_scaling.kind == "llama3":  # by what it divides each frequency (K/2)
        theta, width = config.rope_theta, config.resolved_head_dim
        divisors = rotary_frequencies(theta, width) / rotary_frequencies(theta, width, config.rope_scaling)
        tensors.append(("rope_freqs.weight", divisors, GGMLQuantizationType.F32, False))
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


def _check_model(config: ModelConfig, weight_type: GGUFType) -> None:
    """Raise UserError for an option that GGUF's architectures lack, and for rows that do not fit q8_0."""
    if config.moe is not None:
        raise UserError(
            "A model with experts (model.moe) cannot be exported to GGUF. Export it for Hugging Face, without --gguf."
        )
    check_is_expressible(config, _OPTIONS, "llama.cpp")
    all_heads = config.resolved_head_dim * config.num_heads
    has_divisors = config.rope_scaling is not None and config.rope_scaling.kind == "llama3"
    is_linear = config.rope_scaling is not None and config.rope_scaling.kind == "linear"
    lacking = {
        "model.qk_norm and model.qkv_bias": config.qk_norm and config.qkv_bias,
        "model.qk_norm and model.rope_scaling llama3": config.qk_norm and has_divisors,
        "model.qkv_bias and model.head_dim": config.qkv_bias and all_heads != config.d_model,
        "model.rope_scaling yarn or longrope": config.rope_scaling is not None and not has_divisors and not is_linear,
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


def _check_tokenizer(tokenizer: Tokenizer, config: ModelConfig) -> None:
    """Raise UserError if llama.cpp cannot encode as ``tokenizer`` does, or if it does not belong to the model."""
    if tokenizer.size > (config.vocab_size or 0):
        raise UserError(
            f"The tokenizer has {tokenizer.size:,} ids, the model {config.vocab_size:,}; they do not belong together."
        )
    names: dict[Pattern, str] = {pattern: name for name, pattern in PATTERNS.items()}
    supported = {names[pattern]: None for pattern, _ in _PRETOKENIZERS if pattern in names}
    if (tokenizer.pattern, False) not in _PRETOKENIZERS:
        raise UserError(
            f"tokenizer.pattern {names.get(tokenizer.pattern, tokenizer.pattern)!r} cannot be exported to GGUF: "
            f"llama.cpp has only {', '.join(supported)} of the patterns."
        )
    parts = tokenizer.parts
    options = {
        "ignore_merges": (parts.pattern, parts.ignore_merges) not in _PRETOKENIZERS,
        "normalizer": parts.normalizer,
        "added_tokens": parts.added_tokens,
    }
    if lacking := [name for name, value in options.items() if value]:
        raise UserError(
            f"A tokenizer with {lacking[0]} cannot be exported to GGUF; export a directory for transformers."
        )
    # Without them llama.cpp takes id 11 for the end of a text, and refuses the file, in this order.
    if not tokenizer.special_ids:
        raise UserError("GGUF requires a special token that ends a text, and the tokenizer has no such token.")
    if not tokenizer.merges:
        raise UserError("GGUF requires merges, and the tokenizer has no merges.")


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


def _add_tokenizer_metadata(writer: "GGUFWriter", tokenizer: Tokenizer, config: ModelConfig) -> None:
    """Add tokens, merges, special tokens and chat template. Ids that no token has are marked as unused."""
    from gguf import TokenType

    texts = {i: text for text, i in format_vocab(tokenizer.vocab, tokenizer.special_ids).items()}
    special_ids = {*tokenizer.special_ids.values()}
    tokens, types = [], []
    for token_id in range(config.vocab_size or 0):
        tokens.append(texts.get(token_id, f"[PAD{token_id}]"))
        is_unused, is_special = token_id not in texts, token_id in special_ids
        types.append(TokenType.UNUSED if is_unused else TokenType.CONTROL if is_special else TokenType.NORMAL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_PRETOKENIZERS[tokenizer.pattern, tokenizer.ignore_merges])
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([f"{bytes_to_unicode(left)} {bytes_to_unicode(right)}" for left, right in tokenizer.merges])
    begin, end = find_text_ends(tokenizer)
    end_id = tokenizer.special_ids[end] if end else min(special_ids)
    writer.add_bos_token_id(tokenizer.special_ids[begin] if begin else end_id)
    # Dialogs in the chat template are trained without it.
    template = find_template(tokenizer)
    writer.add_add_bos_token(tokenizer.begin_token is not None and not (template and template.is_own))
    writer.add_add_eos_token(False)
    if template:
        end = END_TOKEN if template.is_own else template.tokens.get("eos_token", end)
        end_id = tokenizer.added_ids.get(end or "", end_id)
        writer.add_eot_token_id(end_id)
        writer.add_chat_template(template.sources["default"])
    writer.add_eos_token_id(end_id)
