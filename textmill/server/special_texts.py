"""A warning for clients that write special tokens as text, as some libraries' servers parse them in every prompt."""

import logging

from lm.tokenizer.text_tokenizer import TextTokenizer
from textmill.server.requests import CompletionRequest, GenerationRequest, list_texts

log = logging.getLogger(__name__)


class SpecialTextNotice:
    """Warns once, when a prompt of ``/v1/completions`` has the text of a special token that is not parsed."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._names: list[str] = list(tokenizer.special_ids)

    def check(self, request: GenerationRequest) -> None:
        """Warn if a prompt of ``request`` is the first with such a text."""
        if not self._names or not isinstance(request, CompletionRequest) or request.parse_special:
            return
        texts = [text for text in (*list_texts(request.prompt), request.suffix) if isinstance(text, str)]
        if name := next((name for name in self._names if any(name in text for text in texts)), None):
            self._names = []
            log.warning(
                "A prompt of /v1/completions has the text %s. It is encoded as plain text, not as the special token; a "
                "request with parse_special: true has it as the token. This is said once.",
                name,
            )
