"""The rotary positions in the ``config.json`` of Hugging Face's models: read and written."""

import math
from pathlib import Path
from typing import Any

from lm.checkpoint.external_weights import read_field
from lm.common.errors import UserError
from lm.model.config import ModelConfig, RopeScaling

_FIELDS = {  # Hugging Face's → ours, by kind; those that a file must have
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_context_length",
    },
    "yarn": {"factor": "factor", "original_max_position_embeddings": "original_context_length"},
}
_MORE_FIELDS = {"beta_fast": "beta_fast", "beta_slow": "beta_slow", "attention_factor": "attention_factor"}  # of yarn
_KINDS = ("default", *_FIELDS, "dynamic", "longrope")


def flatten_rope(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    """Return ``content`` with the fields of ``rope_parameters`` (transformers 5) or ``rope_scaling`` (4) beside the
    others. Raises UserError if one of them is no object."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = content.get(name, {})
        if isinstance(rope, dict) and isinstance(
            full := rope.get("full_attention"), dict
        ):  # of Gemma 3, by type of layer
            local = rope.get("sliding_attention") or {}
            if not isinstance(local, dict) or local.get("rope_type", "default") != "default":
                raise UserError(f"{path}: the rope_type of sliding_attention is not supported; only default.")
            rope = full | ({"rope_local_base_freq": local["rope_theta"]} if "rope_theta" in local else {})
        if not isinstance(rope, dict):
            raise UserError(f"{path}: {name} is {rope!r}; it must be an object or null.")
        content = content | {field: value for field, value in rope.items() if value is not None}
    return content


def read_rope(path: Path, content: dict[str, Any], max_seq_len: int | None) -> dict[str, Any]:
    """Return the options ``rope_scaling``, and ``rope_theta`` and ``context_length`` if they are not those of the file.

    Frequencies that depend on the length of a text (dynamic, longrope) become those of texts of the context's length;
    its default is then the longest that has those of short texts. Raises UserError for another kind, and for a missing
    or a bad field.
    """
    name = "rope_type" if "rope_type" in content else "type"  # its older name
    kind = content.get(name, "default")
    if kind == "su":  # the older name of Phi-3's files
        kind = "longrope"
    if kind == "default":
        return {"rope_scaling": None}
    if kind not in _KINDS:
        raise UserError(f"{path}: {name} {kind!r} is not supported; use a model whose {name} is {' or '.join(_KINDS)}.")
    if kind == "dynamic":
        return {"rope_scaling": None, "rope_theta": _dynamic_theta(path, content, max_seq_len)}
    if kind == "longrope":
        return _read_longrope(path, content, max_seq_len)
    if kind == "yarn" and "original_max_position_embeddings" not in content:
        content = content | {"original_max_position_embeddings": content.get("max_position_embeddings")}
    if missing := [theirs for theirs in _FIELDS[kind] if theirs not in content]:
        raise UserError(f"{path}: {missing[0]} is missing; {name} {kind!r} needs it.")
    options = {ours: content[theirs] for theirs, ours in _FIELDS[kind].items()}
    if kind == "yarn":
        if content.get("truncate", True) is not True:
            raise UserError(f"{path}: truncate {content['truncate']!r} is not supported; only true.")
        options |= {ours: content[theirs] for theirs, ours in _MORE_FIELDS.items() if content.get(theirs)}
        options |= _read_mscale(path, content)
    try:
        return {"rope_scaling": RopeScaling(kind, **options)}
    except UserError as error:
        raise UserError(f"{path}: {name} {kind!r} has an unsupported field: {error}") from None


def _read_mscale(path: Path, content: dict[str, Any]) -> dict[str, float]:
    """Return the attention factor that two fields of DeepSeek's files state."""
    if content.get("attention_factor") or not (content.get("mscale") and content.get("mscale_all_dim")):
        return {}
    numerator, denominator = (read_field(path, content, name, 1.0) for name in ("mscale", "mscale_all_dim"))
    logarithm = math.log(max(1.0, read_field(path, content, "factor", 1.0)))
    return {"attention_factor": (0.1 * numerator * logarithm + 1) / (0.1 * denominator * logarithm + 1)}


def _dynamic_theta(path: Path, content: dict[str, Any], max_seq_len: int | None) -> float:
    """Return transformers' base for a text of ``max_seq_len`` tokens; the file's if the model was trained so long."""
    theta: float = read_field(path, content, "rope_theta", 10000.0)
    trained, factor = (
        read_field(path, content, name, default)
        for name, default in (("max_position_embeddings", 2048), ("factor", 1.0))
    )
    if max_seq_len is None or max_seq_len <= trained:
        return theta
    heads = read_field(path, content, "num_attention_heads", None)
    head_dim = content.get("head_dim") or read_field(path, content, "hidden_size", None) // heads
    width = int(head_dim * read_field(path, content, "partial_rotary_factor", 1.0))
    if width <= 2:
        raise UserError(f"{path}: rope_type 'dynamic' needs heads of more than 2 rotated dimensions.")
    return float(theta * (factor * max_seq_len / trained - (factor - 1)) ** (width / (width - 2)))


def _read_longrope(path: Path, content: dict[str, Any], max_seq_len: int | None) -> dict[str, Any]:
    """Return the scaling of texts as long as those of the first training, or of longer ones for a longer context."""
    longest = read_field(path, content, "max_position_embeddings", 4096)
    trained = read_field(path, content, "original_max_position_embeddings", longest)
    context_length = trained if max_seq_len is None else max_seq_len
    name = "short_factor" if context_length <= trained else "long_factor"
    divisors = content.get(name)
    if not isinstance(divisors, list) or not all(type(divisor) in (int, float) for divisor in divisors):
        raise UserError(f"{path}: {name} is {divisors!r}; rope_type 'longrope' needs a list of numbers.")
    factor = content.get("attention_factor")
    if factor is None:
        ratio = read_field(path, content, "factor", longest / trained)
        factor = math.sqrt(1 + math.log(ratio) / math.log(trained)) if ratio > 1 and trained > 1 else 1.0
    try:
        scaling = RopeScaling("longrope", attention_factor=factor, divisors=[float(divisor) for divisor in divisors])
    except UserError as error:
        raise UserError(f"{path}: rope_type 'longrope' has an unsupported field: {error}") from None
    return {"rope_scaling": scaling, "context_length": context_length}


def rope_fields(config: ModelConfig, stated: frozenset[str]) -> dict[str, Any]:
    """Return the rotary positions for transformers 5, ``rope_parameters``, and for 4, ``rope_scaling``.

    ``stated`` are the options that the architecture's files state.
    """
    fields: dict[str, Any] = {"rope_type": "default"}
    length = {"original_max_position_embeddings": config.context_length}
    if scaling := config.rope_scaling:
        fields = {"rope_type": scaling.kind}
        if scaling.kind == "longrope":
            factors = [*scaling.divisors]
            # The same for all texts: the context is as long as that of the "first training".
            fields |= {
                "short_factor": factors,
                "long_factor": factors,
                "attention_factor": scaling.attention_factor or 1.0,
            }
            fields |= {"original_max_position_embeddings": config.context_length}
        else:
            names = _FIELDS[scaling.kind] | (_MORE_FIELDS if scaling.kind == "yarn" else {})
            fields |= {theirs: value for theirs, ours in names.items() if (value := getattr(scaling, ours)) is not None}
    parameters = fields | {"rope_theta": config.rope_theta}
    content: dict[str, Any] = {"rope_parameters": parameters} | ({"rope_scaling": fields} if scaling else {})
    if scaling and scaling.kind == "longrope":
        content |= length  # where Phi-3 has it
    if "local_rope_theta" in stated:  # transformers 4 reads rope_local_base_freq
        local = {"rope_type": "default", "rope_theta": config.local_rope_theta or config.rope_theta}
        content["rope_parameters"] = {"full_attention": parameters, "sliding_attention": local}
        content |= {"rope_theta": config.rope_theta, "rope_local_base_freq": local["rope_theta"]}
    if "rotary_fraction" in stated:
        parameters["partial_rotary_factor"] = content["partial_rotary_factor"] = config.rotary_fraction
    return content
