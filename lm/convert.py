"""Llama's weights in and out: Meta's checkpoints, and Hugging Face's directories.

The architecture is Llama's, so weights only change their names, with two exceptions. Meta's files hold the parts of a
model that ran in several processes, which are joined. Hugging Face turns (i, i + K/2) of a head and not neighbours, so
the rows of its queries and keys change places. K is the width of a head.

Sources: Touvron et al. 2023 (Llama 2) and Meta's code of it; the ``transformers`` library's Llama.
"""

import json
import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from lm.checkpoint import empty_model, fill, is_plain, read_safetensors, read_tensors, replaced_directory
from lm.errors import UserError
from lm.formats import read_json
from lm.model import ModelConfig, TransformerLM
from lm.pretokens import END_OF_TEXT
from lm.tokenizer import Tokenizer

# Our names of modules → theirs.
_META_NAMES = {
    "token_embeddings": "tok_embeddings",
    "attn.q_proj": "attention.wq",
    "attn.k_proj": "attention.wk",
    "attn.v_proj": "attention.wv",
    "attn.output_proj": "attention.wo",
    "ffn": "feed_forward",
    "ln1": "attention_norm",
    "ln2": "ffn_norm",
    "ln_final": "norm",
    "lm_head": "output",
}
_HUGGING_FACE_NAMES = {
    "layers": "model.layers",
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
# Their fields → our options, and what an absent field stands for (None: it must be there, a whole number).
_META_FIELDS: dict[str, tuple[str, Any]] = {
    "dim": ("d_model", None),
    "n_layers": ("num_layers", None),
    "n_heads": ("num_heads", None),
    "n_kv_heads": ("num_kv_heads", None),
    "vocab_size": ("vocab_size", None),
    "norm_eps": ("norm_eps", 1e-5),
    "rope_theta": ("rope_theta", 10000.0),
}
_META_OTHERS = {"multiple_of", "ffn_dim_multiplier", "max_seq_len", "max_batch_size"}
_HUGGING_FACE_FIELDS: dict[str, tuple[str, Any]] = {
    "hidden_size": ("d_model", None),
    "num_hidden_layers": ("num_layers", None),
    "num_attention_heads": ("num_heads", None),
    "num_key_value_heads": ("num_kv_heads", None),
    "intermediate_size": ("d_ff", None),
    "vocab_size": ("vocab_size", None),
    "max_position_embeddings": ("context_length", 2048),
    "rms_norm_eps": ("norm_eps", 1e-6),
    "rope_theta": ("rope_theta", 10000.0),
    "tie_word_embeddings": ("tied_embeddings", False),
}
_HUGGING_FACE_FIXED = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
_LLAMA_OPTIONS = {"feed_forward": "swiglu", "norm": "pre", "qk_norm": False, "positions": "rope", "logit_softcap": 0}
_DERIVED = ("rope.freqs", "rotary_emb.inv_freq")  # in some files, though they follow from the config
_MOST = 1 << 40  # no number in a config is greater
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def load_meta(
    directory: Path, max_seq_len: int, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> TransformerLM:
    """The model of Meta's ``params.json`` and ``consolidated.NN.pth`` (Llama 1 to 3), ready to generate.

    ``max_seq_len`` becomes its context, which Meta's files do not tell; ``dtype`` is by default that of the files. No
    code in them is run. Raises UserError where a file, a field or a tensor is missing, unknown, damaged or does not
    fit the others.
    """
    path = directory / "params.json"
    params = _read_object(path)
    # A field that is not known here belongs to a newer model, which may compute otherwise.
    if unknown := sorted(name for name in params.keys() - _META_FIELDS - _META_OTHERS if params[name]):
        raise UserError(f"{path}: {unknown[0]} {params[unknown[0]]!r} is not supported; use Llama 1, 2 or 3.")
    shards = _read_shards(directory)
    dim = _field(path, params, "dim", None)
    if params.get("vocab_size", -1) == -1:  # the tokenizer's, which Meta's code counts
        params["vocab_size"] = sum(part.numel() for part in _parts(shards, "tok_embeddings.weight", directory)) // dim
    width = int(8 * dim // 3 * _field(path, params, "ffn_dim_multiplier", 1.0))
    multiple = _field(path, params, "multiple_of", 256)
    config = _config(
        path,
        {"n_kv_heads": params.get("n_heads")} | params,
        _META_FIELDS,
        context_length=max_seq_len,
        d_ff=-(-width // multiple) * multiple,
    )
    return _assemble(config, shards, _META_NAMES, directory, device, dtype)


def load_hugging_face(
    directory: Path,
    max_seq_len: int | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> TransformerLM:
    """The model of a Hugging Face directory (``config.json`` of a Llama; safetensors in one file or several), ready to
    generate.

    ``max_seq_len`` is the context, by default ``max_position_embeddings``; ``dtype`` is by default that of the files.
    Raises UserError where a file, a field or a tensor is missing, unknown, damaged or does not fit the others, and for
    fields that ask for what our model does not have: biases, scaled rotary positions, wider heads.
    """
    path = directory / "config.json"
    content = {"model_type": "unknown"} | _read_object(path)
    for name in ("rope_parameters", "rope_scaling"):  # where newer and older files have a part of the fields
        rope = content.get(name, {})
        if not isinstance(rope, dict):
            raise UserError(f"{path}: {name} is {rope!r}; it must be an object or null.")
        content |= rope
    fixed = {"rope_type": "default", "type": "default", "partial_rotary_factor": 1}
    _check_fixed(path, content, _HUGGING_FACE_FIXED | fixed)
    others = {} if max_seq_len is None else {"context_length": max_seq_len}
    content = {"num_key_value_heads": content.get("num_attention_heads")} | content
    config = _config(path, content, _HUGGING_FACE_FIELDS, **others)
    _check_fixed(path, content, {"head_dim": config.d_model // config.num_heads})
    tensors = _read_safetensors(directory)
    if config.tied_embeddings and "lm_head.weight" in tensors:  # some files have the one matrix under both names
        head = tensors.pop("lm_head.weight")
        if not head.equal(tensors.get("model.embed_tokens.weight", head)):
            raise UserError(f"{path} ties the embeddings, but the weights have two; set tie_word_embeddings to false.")
    model = _assemble(config, [tensors], _HUGGING_FACE_NAMES, directory, device, dtype)
    for name, parameter in model.named_parameters():
        parameter.data = _regroup(name, parameter.data, 2, config.d_model // config.num_heads // 2)
    return model


def save_hugging_face(model: TransformerLM, tokenizer: Tokenizer, directory: Path) -> None:
    """Write what transformers' ``AutoModelForCausalLM`` and ``AutoTokenizer`` read: ``config.json``,
    ``model.safetensors`` in the dtype of the model, ``generation_config.json``, ``tokenizer.json`` and
    ``tokenizer_config.json``. Generation stops at any special token, as ours does.

    All files appear at once. Raises UserError where there is something at ``directory``, but for an empty directory,
    where Llama does not have an option of the model, and where the tokenizer has more ids than the model.
    """
    directory = directory.resolve()
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise UserError(f"{directory} is there already; name a new or an empty directory.")
    config = model.config
    for option, value in _LLAMA_OPTIONS.items():
        if getattr(config, option) != value:
            raise UserError(
                f"model.{option} {getattr(config, option)!r} cannot be exported: Hugging Face's Llama has {value!r} "
                "only; train a model with that."
            )
    if tokenizer.size > (config.vocab_size or 0):
        raise UserError(
            f"The tokenizer has {tokenizer.size:,} ids, the model {config.vocab_size:,}; they do not belong together."
        )
    half = config.d_model // config.num_heads // 2
    weights = {
        _translate(name, _HUGGING_FACE_NAMES): _regroup(name, weight, half, 2).cpu().contiguous()
        for name, weight in model.state_dict().items()
    }
    end = END_OF_TEXT if END_OF_TEXT in tokenizer.special_ids else None
    # Said where there are none too, since the default is ids 1 and 2.
    ends = {
        "bos_token_id": tokenizer.special_ids.get(END_OF_TEXT),
        "eos_token_id": [*tokenizer.special_ids.values()] or None,
    }
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}  # transformers 5 reads this, 4 the field
    contents = {
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            **_HUGGING_FACE_FIXED,
            **{theirs: getattr(config, ours) for theirs, (ours, _) in _HUGGING_FACE_FIELDS.items()},
            "num_key_value_heads": config.kv_heads,
            "rope_parameters": rope,
            "torch_dtype": str(model.head_weight.dtype).removeprefix("torch."),
            **ends,
        },
        "generation_config.json": ends,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": end,
            "eos_token": end,
            "model_max_length": config.context_length,
            "clean_up_tokenization_spaces": False,
        },
    }
    with replaced_directory(directory) as temporary:
        save_file(weights, temporary / "model.safetensors", metadata={"format": "pt"})  # which transformers 4 asks for
        tokenizer.save_tokenizer_json(temporary / "tokenizer.json")
        for name, content in contents.items():
            (temporary / name).write_text(json.dumps(content, ensure_ascii=False, indent=2), encoding="utf-8")


def _read_object(path: Path) -> dict[str, Any]:
    """The fields of a JSON object, without those that are null."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a model's config: expected one JSON object.")
    return {name: value for name, value in content.items() if value is not None}


def _field(path: Path, content: dict[str, Any], name: str, default: int | float | bool | None) -> Any:
    """A field of the kind of ``default``, which stands for it where it is absent; without one, a whole number."""
    value: Any = content.get(name, default)
    if isinstance(default, bool):
        fits, wanted = isinstance(value, bool), "true or false"
    elif isinstance(default, float):
        fits, wanted = type(value) in (int, float) and 0 <= value < _MOST, "a number of at least 0"
    else:
        fits, wanted = type(value) is int and 0 < value < _MOST, "a whole number of at least 1"
    if not fits:
        raise UserError(f"{path}: {name} is {'missing' if value is None else repr(value)}; it must be {wanted}.")
    return value


def _config(path: Path, content: dict[str, Any], fields: dict[str, tuple[str, Any]], **others: int) -> ModelConfig:
    """The config that the file at ``path`` describes by ``fields``, and ``others`` beside it."""
    options = {ours: _field(path, content, theirs, default) for theirs, (ours, default) in fields.items()}
    try:
        return ModelConfig(**(options | others))
    except UserError as error:
        raise UserError(f"{path} describes no model of ours: {error}") from None


def _check_fixed(path: Path, content: dict[str, Any], fixed: dict[str, Any]) -> None:
    for name, value in fixed.items():
        if content.get(name, value) != value:
            raise UserError(
                f"{path}: {name} {content[name]!r} is not supported; use a model whose {name} is {value!r}."
            )


def _read_shards(directory: Path) -> list[dict[str, Tensor]]:
    """The tensors of ``consolidated.NN.pth``, one dict a file, in their order; mapped from the disk."""
    paths = sorted(directory.glob("consolidated.*.pth"))
    expected = [directory / f"consolidated.{number:02}.pth" for number in range(len(paths) or 1)]
    if missing := [path.name for path in expected if path not in paths]:
        raise UserError(f"{directory} has no {missing[0]}; put all files of the checkpoint there.")
    shards = [read_tensors(path, mmap=True) for path in paths]
    for path, shard in zip(paths, shards, strict=True):
        if not isinstance(shard, dict) or not all(isinstance(name, str) and is_plain(shard[name]) for name in shard):
            raise UserError(f"{path} is not one of Meta's checkpoints: expected a dict of plain tensors.")
    return shards


def _read_safetensors(directory: Path) -> dict[str, Tensor]:
    """The tensors of ``model.safetensors``, or of the files that its index names; mapped from the disk."""
    paths = [directory / "model.safetensors"]
    index = directory / "model.safetensors.index.json"
    if not paths[0].exists() and index.exists():
        files = _read_object(index).get("weight_map")
        if not isinstance(files, dict):
            raise UserError(f"{index} has no weight_map, the file of each tensor.")
        if outside := [name for name in files.values() if not isinstance(name, str) or Path(name).name != name]:
            raise UserError(f"{index} names {outside[0]!r}; each file must lie in {directory} itself.")
        paths = sorted({directory / name for name in files.values()})
    tensors: dict[str, Tensor] = {}
    for path in paths:
        tensors |= read_safetensors(path)
    return tensors


def _assemble(
    config: ModelConfig,
    shards: Sequence[dict[str, Tensor]],
    names: dict[str, str],
    directory: Path,
    device: torch.device | str,
    dtype: torch.dtype | None,
) -> TransformerLM:
    """The model of ``config`` with the tensors of ``shards`` under their ``names``, each copied once."""
    model = empty_model(config, sum(map(len, shards)), str(directory))
    weights = {}
    for name, expected in model.state_dict().items():
        theirs = _translate(name, names)
        parts = _parts(shards, theirs, directory)
        joined = _join(parts, expected.shape)
        if joined is None:
            raise UserError(
                f"{directory}: {theirs} has the shape {' and '.join(str(tuple(part.shape)) for part in parts)}; the "
                f"config wants {tuple(expected.shape)}, whole, in equal copies or in even pieces. "
                "Use all files of one model, with its own config."
            )
        weights[name] = joined.to(device, dtype, copy=True)  # so that it does not hang on the file
    known = {_translate(name, names) for name in weights}
    if unknown := [name for name in chain(*shards) if name not in known and not name.endswith(_DERIVED)]:
        raise UserError(f"{directory} has {unknown[0]}, which no Llama of its config has; use the weights' own config.")
    fill(model, weights, str(directory), device)
    return model.eval()


def _translate(name: str, names: dict[str, str]) -> str:
    """``layers.0.attn.q_proj.weight`` in the words of ``names``, of which the first that fits is taken."""
    return re.sub(rf"\b({'|'.join(map(re.escape, names))})\b", lambda found: names[found[0]], name)


def _parts(shards: Sequence[dict[str, Tensor]], name: str, directory: Path) -> list[Tensor]:
    """What each shard has of the tensor ``name``."""
    parts = [shard[name] for shard in shards if name in shard]
    if len(parts) < len(shards):
        raise UserError(f"{directory} has {name} in {len(parts)} of {len(shards)} files; use all files of one model.")
    if other := [part.dtype for part in parts if part.dtype not in _DTYPES or part.dtype != parts[0].dtype]:
        raise UserError(f"{directory}: {name} is {other[0]}; it must be floating-point, and the same in all files.")
    return parts


def _join(parts: list[Tensor], shape: torch.Size) -> Tensor | None:
    """The tensor of ``shape`` that ``parts`` are copies of, or even pieces of; None where they are neither.

    The shapes tell along which dimension it was cut, which for the embedding is not the same in all of Meta's code.
    """
    if all(part.shape == shape for part in parts):
        return parts[0] if all(part.equal(parts[0]) for part in parts[1:]) else None
    for dim, size in enumerate(shape):
        piece = (*shape[:dim], size // len(parts), *shape[dim + 1 :])
        if size % len(parts) == 0 and all(part.shape == piece for part in parts):
            return torch.cat(parts, dim)
    return None


def _regroup(name: str, weight: Tensor, *groups: int) -> Tensor:
    """The rows of each head of q or k, of ``groups`` (a, b), in the order of (b, a); other weights as they are.

    (2, K/2) makes neighbours of Hugging Face's pairs (i, i + K/2), (K/2, 2) undoes that.
    """
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return weight
    return weight.unflatten(0, (-1, *groups)).transpose(1, 2).flatten(0, 2)
