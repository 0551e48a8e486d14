"""All that defines a tokenizer: what its files hold."""

from collections.abc import Sequence
from typing import NamedTuple

from lm.text.pretokenize import Pattern
from lm.tokenizer.added_tokens import AddedToken


class TokenizerParts(NamedTuple):
    """The arguments of :class:`lm.tokenizer.tokenizer.Tokenizer`, in its order."""

    vocab: dict[int, bytes]
    merges: list[tuple[bytes, bytes]]
    special_tokens: list[str]
    pattern: Pattern
    ignore_merges: bool = False
    normalizer: str | None = None
    added_tokens: Sequence[AddedToken] = ()  # those that are more than a special token's text
    begin_token: str | None = None
    character_tables: str | None = None  # see lm.text.character_tables

    def added_ids(self) -> dict[str, int]:
        """Return the ids of all added tokens, special or not."""
        own_ids = {token.content: token.id for token in self.added_tokens if token.id is not None}
        others = set(own_ids.values())
        ids = {token: token_id for token_id, token in self.vocab.items() if token_id not in others}
        contents = dict.fromkeys([*self.special_tokens, *(token.content for token in self.added_tokens)])
        return {text: own_ids[text] if text in own_ids else ids[text.encode()] for text in contents}
