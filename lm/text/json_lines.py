"""Parsing of one line of JSON Lines."""

import json
from typing import Any


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
