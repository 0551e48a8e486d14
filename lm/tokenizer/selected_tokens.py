"""The added tokens that a call of the tokenizer looks for, and the forms in which it finds them."""

from collections.abc import Mapping, Sequence
from functools import cached_property

from lm.kernels.bpe.pretokens import Specials, pack_specials
from lm.tokenizer.added_tokens import AddedToken, PieceSplitter, needs_no_context
from lm.tokenizer.composed_stream import TextComposer, can_compose


class SelectedTokens:
    """Some of a tokenizer's added tokens. ``ids`` are those of all by their texts."""

    def __init__(self, tokens: Sequence[AddedToken], ids: Mapping[str, int], normalizer: str | None) -> None:
        self.tokens, self._ids, self._normalizer = tokens, ids, normalizer

    @cached_property
    def needs_no_context(self) -> bool:
        """Whether one search for all of them in the raw text is right."""
        return needs_no_context(self.tokens, self._normalizer)

    @cached_property
    def specials(self) -> Specials:
        """The tokens for the compiled encoder."""
        return pack_specials([(token.content.encode(), self._ids[token.content]) for token in self.tokens])

    @cached_property
    def composer(self) -> TextComposer | None:
        """The normalizer of the text between them, if it is NFC and can be applied to a stream."""
        is_possible = self._normalizer == "NFC" and self.needs_no_context and can_compose(self.tokens)
        return TextComposer(self.tokens) if is_possible else None

    @cached_property
    def splitter(self) -> PieceSplitter:
        """The splitter of texts that need more than one search."""
        return PieceSplitter(self.tokens, self._normalizer)
