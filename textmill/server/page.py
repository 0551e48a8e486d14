"""The page at ``/``: a chat and a completion in the browser, in one static file."""

import base64
import hashlib
import re
from pathlib import Path
from typing import Literal

from starlette.responses import HTMLResponse, Response


def page_response(first_tab: Literal["chat", "completion"]) -> Response:
    """Return the page, which opens on ``first_tab``.

    Its policy lets the browser run the page's own script only, and connect to this server only.
    """
    html = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
    html = html.replace('data-first-tab="chat"', f'data-first-tab="{first_tab}"')
    [script], [style] = (re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL) for tag in ("script", "style"))
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}
    return HTMLResponse(html, headers=headers)


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
