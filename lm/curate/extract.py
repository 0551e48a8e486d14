"""Extraction: the text of an HTML page."""

from functools import cache

from lm.text.web_pages import PageReader


@cache
def _reader() -> PageReader:
    return PageReader()


def extract_text(html: bytes, main_content: bool = False) -> str | None:
    """Return the text of an HTML page as resiliparse gives it; None if the page cannot be parsed.

    ``main_content``: without navigation, advertisements and the like. The encoding is detected. The page is parsed in
    a process with limits of CPU time and memory, which the first call starts. Ingest reads pages by the same code.
    Raises UserError if the extra ``web`` is missing.
    """
    return _reader().read("page", html, "main" if main_content else "whole").get("text")
