"""Rotary positions in Hugging Face's ``config.json``: ``rope_parameters`` of transformers 5, ``rope_scaling`` of 4."""

from pathlib import Path
from typing import Any

from lm.common.errors import UserError
from lm.model.rope_config import RopeScaling

_KINDS = ("default", "linear", "llama3")
_FIELDS = {  # Hugging Face's → ours
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_context_length",
}


def flatten_rope_fields(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    """Return ``content`` with the fields of its rotary positions, whichever version wrote them, beside the others."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = content.get(name, {})
        if not isinstance(rope, dict):
            raise UserError(f"{path}: {name} is {rope!r}; it must be an object or null.")
        content = content | rope
    return content


def read_rope_scaling(path: Path, content: dict[str, Any]) -> RopeScaling | None:
    """Return the scaling that the fields of :func:`flatten_rope_fields` describe, None if the positions have none.

    Raises UserError for another kind, and for a missing or a bad field.
    """
    name = "rope_type" if "rope_type" in content else "type"  # its older name
    kind = content.get(name, "default")
    if kind not in _KINDS:
        raise UserError(f"{path}: {name} {kind!r} is not supported; use a model whose {name} is {' or '.join(_KINDS)}.")
    if kind == "default":
        return None
    names = _field_names(kind)
    if missing := [theirs for theirs in names if theirs not in content]:
        raise UserError(f"{path}: {missing[0]} is missing; {name} {kind!r} needs it.")
    options = {ours: content[theirs] for theirs, ours in names.items()}
    try:
        return RopeScaling(kind, **options)
    except UserError as error:
        raise UserError(f"{path}: {name} {kind!r} has an unsupported field: {error}") from None


def rope_fields(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """Return the fields of ``config.json`` for rotary positions: the reverse of :func:`read_rope_scaling`."""
    if scaling is None:
        return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    names = _field_names(scaling.kind)
    fields = {"rope_type": scaling.kind} | {theirs: getattr(scaling, ours) for theirs, ours in names.items()}
    return {"rope_parameters": fields | {"rope_theta": theta}, "rope_scaling": fields}


def _field_names(kind: str) -> dict[str, str]:
    return _FIELDS if kind == "llama3" else {"factor": "factor"}
