"""Speculative decoding without a second model: draft tokens come from repetitions in the text.

If the last tokens occurred before, the tokens that followed them are a draft. The model computes all draft tokens of a
step in one pass. If memory bandwidth limits the speed, this takes little longer than one token. Then tokens are sampled
in turn; as long as a sample equals its draft token, the logits of the next one are those of the text so far. So the
text has the same distribution as without drafts. The draft tokens are deterministic. For these, the rule of the papers
is the same: accept a draft token with the model's probability p, else sample among the other tokens.

Sources: Leviathan et al. 2023 and Chen et al. 2023 (speculative decoding); Yang et al. 2023 (LLMA) and Saxena 2023
(prompt lookup: drafts from the text).
"""

from collections.abc import Sequence

_MIN_NGRAM, _MAX_NGRAM = 2, 4  # tokens; shorter ones repeat by chance, longer ones rarely have another continuation


class PromptLookup:
    """Drafts the next tokens of one text, at most ``max_tokens`` at a time.

    The draft follows the latest earlier occurrence of the longest n-gram of 2 to 4 tokens that ends the text. A draft
    that reaches the end of the text goes on with itself, as a loop does. After a rejected token the next drafts are
    shorter, after an accepted draft longer.
    """

    def __init__(self, prompt: Sequence[int], max_tokens: int) -> None:
        self._tokens = list(prompt)
        self._num_prompt_tokens, self._max_tokens, self._num_tokens = len(prompt), max_tokens, max_tokens
        self._following: dict[tuple[int, ...], int] = {}  # n-gram → index after its latest occurrence before the end
        self._num_indexed = 0

    def draft(self, new_ids: Sequence[int], limit: int) -> list[int]:
        """Return draft tokens after the prompt and ``new_ids``, at most ``limit``; often none.

        ``new_ids`` must begin with those of the call before.
        """
        tokens = self._tokens
        tokens += new_ids[len(tokens) - self._num_prompt_tokens :]
        for end in range(self._num_indexed, len(tokens)):
            for size in range(_MIN_NGRAM, min(_MAX_NGRAM, end) + 1):
                self._following[tuple(tokens[end - size : end])] = end
        self._num_indexed = len(tokens)
        for size in range(min(_MAX_NGRAM, len(tokens)), _MIN_NGRAM - 1, -1):
            if start := self._following.get(tuple(tokens[-size:])):
                period = len(tokens) - start
                return [tokens[start + i % period] for i in range(min(limit, self._num_tokens))]
        return []

    def record(self, num_draft: int, num_accepted: int) -> None:
        """Choose the length of the next draft by how much of this one was accepted."""
        is_accepted = num_accepted == num_draft
        self._num_tokens = min(self._max_tokens, 2 * self._num_tokens) if is_accepted else max(1, num_accepted)
