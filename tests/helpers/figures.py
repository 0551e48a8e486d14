"""Figures without their drawing, which takes matplotlib a quarter of a second each."""

import base64
from pathlib import Path
from typing import Any

_PNG = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII=")


def save_tiny_image(figure: Any, out: Any, **options: Any) -> None:
    """Save an image of one pixel: a replacement of ``matplotlib.figure.Figure.savefig``."""
    out.write(_PNG) if hasattr(out, "write") else Path(out).write_bytes(_PNG)
