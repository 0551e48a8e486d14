"""Where the base of an adapter is: a file beside the adapter's checkpoints names the checkpoint of the frozen model."""

import json
import os
from pathlib import Path
from typing import Any

from torch import Tensor

from lm.common.errors import UserError, translate_write_errors
from lm.files.json import read_json
from lm.model.config import AdapterConfig

BASE_FILE = "base.json"
"""Name of that file. It is no part of the result of a training, which depends on the content of the base alone."""


def write_base(out: Path, base: Path) -> None:
    """Write to the directory ``out`` of an adapter's checkpoints that ``base`` is the frozen model's checkpoint."""
    with translate_write_errors(out):
        content = {"checkpoint": os.path.relpath(base.resolve(), out.resolve())}
        (out / BASE_FILE).write_text(json.dumps(content), encoding="utf-8")


def possible_bases(checkpoint: Path) -> list[Path]:
    """Return the directories in which the base of the adapter in ``checkpoint`` may be, the likeliest first.

    It is where :func:`write_base` says, or beside that place: a stage that ran again has its files in another
    directory. Raises UserError if the file is missing or damaged.
    """
    path = checkpoint.parent / BASE_FILE
    content = read_json(path)
    if not (isinstance(content, dict) and isinstance(content.get("checkpoint"), str)):
        raise UserError(f"{path} does not name the base of the adapter; train it again.")
    base = Path(os.path.normpath(checkpoint.parent / content["checkpoint"]))
    return [base, *sorted(base.parent.parent.glob(f"*/{base.name}"))]


def read_adapter(about: Any, weights: dict[str, Tensor], name: str) -> tuple[AdapterConfig, str]:
    """Return the config and the digest of the base in the entry ``adapter`` of a checkpoint's description.

    Raises UserError if it has none, or if ``weights`` have another rank.
    """
    match about:
        case {"base": str(digest), **options}:
            known: dict[str, Any] = {key: options[key] for key in AdapterConfig.__dataclass_fields__ if key in options}
            adapter = AdapterConfig(**known)
            if all(len(weight) == adapter.rank for key, weight in weights.items() if key.endswith("lora_A")):
                return adapter, digest
    raise UserError(f"The checkpoint {name} has no valid description of its adapter; train it again.")
