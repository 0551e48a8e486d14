"""Statistics of a text, counted while it is read."""

import math
from dataclasses import dataclass, field, replace


@dataclass
class TextStatistics:
    """Number of documents, of invalid UTF-8 sequences replaced and of separators removed, and a length histogram.

    ``lengths[k]`` counts the documents of at least 2^(k/4) and fewer than 2^((k+1)/4) characters.
    """

    documents: int = 0
    replaced: int = 0
    separators_removed: int = 0
    lengths: list[int] = field(default_factory=lambda: [0] * 256)

    def add_document(self, length: int) -> None:
        """Count a document of ``length`` characters."""
        self.documents += 1
        self.lengths[int(4 * math.log2(max(1, length)))] += 1

    def __sub__(self, part: "TextStatistics") -> "TextStatistics":
        """Return the statistics without the documents of ``part``."""
        lengths = [whole - other for whole, other in zip(self.lengths, part.lengths, strict=True)]
        return replace(self, documents=self.documents - part.documents, lengths=lengths)

    def __add__(self, other: "TextStatistics") -> "TextStatistics":
        return TextStatistics(
            self.documents + other.documents,
            self.replaced + other.replaced,
            self.separators_removed + other.separators_removed,
            [sum(counts) for counts in zip(self.lengths, other.lengths, strict=True)],
        )
