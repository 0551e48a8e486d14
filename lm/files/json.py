"""Reading of JSON files, and of JSON texts such as a line of JSON Lines; writing of JSON Lines."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from lm.common.errors import UserError, translate_write_errors
from lm.files.atomic_dir import sync_path


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises UserError for a missing or malformed file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:  # RecursionError: deeply nested brackets
        raise UserError(f"{path} is not a JSON file: {error}.") from None


def parse_json(text: str) -> Any:
    """Return the value of a JSON text. An integer of more digits than Python converts (4,300) becomes a float.

    Raises ValueError with the reason.
    """
    try:
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            raise
        except ValueError:
            return json.loads(text, parse_int=float)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None


def write_json_lines(path: Path, rows: Iterable[Mapping[str, Any]], mode: Literal["w", "a"] = "w") -> None:
    """Replace a file of JSON Lines atomically, or append to it. A lone surrogate is written as JSON's escape.

    Raises StorageError if it cannot be written.
    """
    written = path.with_name(f"{path.name}.tmp") if mode == "w" else path
    with translate_write_errors(path):
        with written.open(mode, encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        if mode == "w":
            sync_path(written)
            written.replace(path)
