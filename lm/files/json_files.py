"""JSON files."""

import json
from pathlib import Path
from typing import Any

from lm.common.errors import UserError


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises UserError for a missing or malformed file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:  # RecursionError: deeply nested brackets
        raise UserError(f"{path} is not a JSON file: {error}.") from None
