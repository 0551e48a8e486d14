"""Reading of JSON files, and of JSON texts such as a line of JSON Lines."""

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
