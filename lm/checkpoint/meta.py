"""Load weights from Meta's Llama files: ``params.json`` and ``consolidated.NN.pth``."""

from pathlib import Path

import torch
from torch import Tensor

from lm.checkpoint.external_weights import (
    FieldTable,
    assemble_model,
    collect_parts,
    read_field,
    read_json_object,
    read_model_config,
)
from lm.checkpoint.safe_load import is_state_dict, read_tensors
from lm.common.errors import UserError
from lm.model.transformer import TransformerLM

_MODULE_NAMES = {  # ours → Meta's
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
_FIELDS: FieldTable = {
    "dim": ("d_model", None),
    "n_layers": ("num_layers", None),
    "n_heads": ("num_heads", None),
    "n_kv_heads": ("num_kv_heads", None),
    "vocab_size": ("vocab_size", None),
    "norm_eps": ("norm_eps", 1e-5),
    "rope_theta": ("rope_theta", 10000.0),
}


def load_meta(
    directory: Path, max_seq_len: int, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> TransformerLM:
    """Load a model of Llama 1 to 3 from Meta's files, in evaluation mode, without running code.

    ``max_seq_len`` becomes its context length, which the files do not state. ``dtype`` defaults to that of the
    embedding. Raises UserError if a file, a field or a tensor is missing, unknown, damaged or does not fit the others.
    """
    path = directory / "params.json"
    params = read_json_object(path)
    # An unknown field belongs to a newer model, which may compute differently.
    others = {"multiple_of", "ffn_dim_multiplier", "max_seq_len", "max_batch_size"}
    if unknown := sorted(name for name in params.keys() - _FIELDS - others if params[name]):
        raise UserError(f"{path}: {unknown[0]} {params[unknown[0]]!r} is not supported; use Llama 1, 2 or 3.")
    shards = _read_shards(directory)
    dim = read_field(path, params, "dim", None)
    if params.get("vocab_size", -1) == -1:  # Meta's code takes it from the tokenizer
        embedding_parts = collect_parts(shards, "tok_embeddings.weight", directory)
        params["vocab_size"] = sum(part.numel() for part in embedding_parts) // dim
    width = int(8 * dim // 3 * read_field(path, params, "ffn_dim_multiplier", 1.0))
    multiple = read_field(path, params, "multiple_of", 256)
    params = {"n_kv_heads": params.get("n_heads")} | params
    d_ff = -(-width // multiple) * multiple
    config = read_model_config(path, params, _FIELDS, context_length=max_seq_len, d_ff=d_ff)
    return assemble_model(config, shards, _MODULE_NAMES, directory, device, dtype)


def _read_shards(directory: Path) -> list[dict[str, Tensor]]:
    """Return the memory-mapped tensors of each ``consolidated.NN.pth``, in order."""
    paths = sorted(directory.glob("consolidated.*.pth"))
    expected = [directory / f"consolidated.{number:02}.pth" for number in range(len(paths) or 1)]
    if missing := [path.name for path in expected if path not in paths]:
        raise UserError(f"{directory} has no {missing[0]}; put all files of the checkpoint there.")
    shards = [read_tensors(path, mmap=True) for path in paths]
    for path, shard in zip(paths, shards, strict=True):
        if not is_state_dict(shard):
            raise UserError(f"{path} is not one of Meta's checkpoints: expected a dict of plain tensors.")
    return shards
