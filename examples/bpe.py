"""Byte pair encoding: train a tokenizer on a text, then encode and decode.

``python examples/bpe.py`` prints how many bytes of unseen text one token holds. A few seconds on two cores, after the
first run on a machine, which compiles the kernels.
"""

import tempfile
from pathlib import Path

from lm.text import END_OF_TEXT, demo_stories
from lm.tokenizer import Tokenizer, train_bpe


def train_tokenizer(vocab_size: int = 512) -> Tokenizer:
    """Return a tokenizer of ``vocab_size`` ids: the 256 bytes, one special token, and merges of frequent pairs."""
    with tempfile.TemporaryDirectory() as directory:
        corpus = Path(directory, "stories.txt")
        corpus.write_text("".join(demo_stories(2000)), encoding="utf-8")
        # Pretokens, words with the space before them, are counted once; merges never cross their borders.
        vocab, merges = train_bpe(corpus, vocab_size, [END_OF_TEXT])
    return Tokenizer(vocab, merges, [END_OF_TEXT])


def main() -> None:
    """Train, show some tokens, and measure the compression on stories that the training did not see."""
    tokenizer = train_tokenizer()
    print("first merges:", [b"".join(pair).decode() for pair in tokenizer.merges[:8]])
    print("last merges:", [b"".join(pair).decode() for pair in tokenizer.merges[-8:]])

    story = next(demo_stories(1, seed=1))
    ids = tokenizer.encode(story)
    assert tokenizer.decode(ids) == story  # the encoding loses nothing
    print("tokens:", [tokenizer.decode([token_id]) for token_id in ids[:12]])

    unseen = "".join(demo_stories(200, seed=1))
    ratio = len(unseen.encode()) / len(tokenizer.encode(unseen))
    print(f"bytes per token: {ratio:.2f}")


if __name__ == "__main__":
    main()
