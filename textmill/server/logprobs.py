"""Log-probabilities in the forms of OpenAI's API: one for completions, one for chats.

They cover the generated tokens, including those of a stop text and a special token that ends the text, and with
``echo`` the prompt's tokens. So ``max_tokens: 1`` always adds one token, as evaluation harnesses expect. A token whose
bytes are not whole characters is written as ``bytes:\\xc3``, so that different tokens have different names.
"""

from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lm.inference.completion import TextStream
from lm.inference.generation_request import Generation
from lm.tokenizer.text_tokenizer import TextTokenizer

_MIN_LOGPROB = -9999.0  # OpenAI's value for "impossible"; JSON has no infinity


class ScoredToken(NamedTuple):
    """A token, its log-probability, and the most likely tokens in its place."""

    token_id: int
    logprob: float | None
    """None for the first token of a prompt, which follows nothing."""
    alternatives: Sequence[tuple[int, float]]


class TokenNames:
    """The text and the bytes of tokens."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        special_tokens = {token_id: name.encode() for name, token_id in tokenizer.special_ids.items()}
        self._bytes = ChainMap(special_tokens, tokenizer.vocab)
        self.text_bytes: Mapping[int, bytes] = ChainMap(dict.fromkeys(special_tokens, b""), tokenizer.vocab)
        """The bytes that a token adds to a text: a special token has none."""

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a token; of a special token, those of its name; none if the vocabulary has no such id."""
        return self._bytes.get(token_id, b"")

    def name(self, token_id: int) -> str:
        """Return the text of a token, or its bytes if they are not whole characters."""
        token = self.bytes_of(token_id)
        try:
            return token.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


class LogprobsWriter:
    """Writes the log-probabilities of one choice, part by part."""

    def __init__(self, generation: Generation, names: TokenNames, is_chat: bool) -> None:
        self._generation, self._names, self._is_chat = generation, names, is_chat
        self._stream, self._offset = TextStream(names.text_bytes), 0
        self._num_echoed = len(generation.prompt) if generation.wants_prompt_logprobs else 0
        self._num_taken: int | None = None

    def take(self, end: int | None) -> list[ScoredToken]:
        """Return the next tokens: of an echoed prompt, then those generated before index ``end``. If None, return all
        that are left, and the one that ended the generation."""
        generation, part = self._generation, slice(self._num_taken, end)
        parts: list[tuple[Sequence[Any], ...]] = []  # each ids, log-probabilities and alternatives
        if self._num_taken is None and self._num_echoed:  # the prompt's first token follows nothing
            prompt_logprobs, alternatives = generation.prompt_logprobs, generation.prompt_alternatives
            parts.append((generation.prompt, [None, *prompt_logprobs], [[], *alternatives]))
        parts.append((generation.ids[part], generation.logprobs[part], generation.alternatives[part]))
        tokens = [ScoredToken(*row) for columns in parts for row in zip(*columns, strict=True)]
        if end is None and generation.end_score:
            end_id, score = generation.end_score
            tokens.append(ScoredToken(end_id, *score))
        self._num_taken = end
        return tokens

    def to_json(self, tokens: Sequence[ScoredToken]) -> dict[str, Any]:
        """Return the JSON object of the next tokens."""
        if self._is_chat:
            return {"content": [self._chat_entry(token) for token in tokens], "refusal": None}
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._stream.add(token.token_id))
            self._num_echoed -= 1
            if self._num_echoed == 0:
                self._offset += len(self._stream.finish())
        has_alternatives = self._generation.num_alternatives > 0
        return {
            "tokens": [self._names.name(token.token_id) for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [self._completion_entry(token) for token in tokens] if has_alternatives else None,
            "text_offset": offsets,
        }

    def _completion_entry(self, token: ScoredToken) -> dict[str, float] | None:
        """Return the log-probabilities of the most likely tokens and of the token itself."""
        if token.logprob is None:
            return None
        result: dict[str, float] = {}
        for token_id, logprob in (*token.alternatives, (token.token_id, token.logprob)):
            result.setdefault(self._names.name(token_id), _finite(logprob))
        return result

    def _chat_entry(self, token: ScoredToken) -> dict[str, Any]:
        """Return the log-probability of the token, and those of the most likely tokens."""
        names, scores = self._names, [(token.token_id, token.logprob), *token.alternatives]
        entry, *alternatives = (
            {"token": names.name(token_id), "logprob": _finite(logprob), "bytes": [*names.bytes_of(token_id)]}
            for token_id, logprob in scores
        )
        return {**entry, "top_logprobs": alternatives}


def _finite(logprob: float | None) -> Any:
    return logprob if logprob is None or logprob > _MIN_LOGPROB else _MIN_LOGPROB  # also if it is nan
