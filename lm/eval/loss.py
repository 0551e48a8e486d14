"""Loss per byte of text."""

import math


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """Convert a loss in nats per token to bits per byte of text, which compares across tokenizers."""
    return loss / math.log(2) / bytes_per_token
