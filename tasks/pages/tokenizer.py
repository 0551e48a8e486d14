"""Pages of a tokenizer, and of a comparison of tokenizers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tasks.pages.charts import draw_bars, embed_figure, histogram, new_figure, token_picture, token_texts
from tasks.pages.markdown import code, escape_markdown, table

if TYPE_CHECKING:
    from lm.experiments.equal_flops import LossAtFlops
    from lm.tokenizer.compare import Comparison
    from lm.tokenizer.config import TokenizerConfig
    from tasks.runtime.inputs import Ranges
    from tasks.runtime.output import Output
    from tasks.runtime.run_context import Attempt


def merge(
    out: "Attempt", counts: "Output", config: "TokenizerConfig", text: Sequence["Ranges"] = (), tables: str = ""
) -> Iterator[str]:
    """Show the tokenizer: its size, a sentence in tokens, and the lengths of the tokens."""
    from lm.tokenizer.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(out.directory / "tokenizer")
    special_tokens, pattern = ", ".join(map(code, tokenizer.special_tokens)), tokenizer.pattern
    yield (
        f"**{tokenizer.size:,}** token ids: 256 bytes, {len(tokenizer.merges):,} merges, special tokens "
        f"{special_tokens}. Pattern: {code(pattern if isinstance(pattern, str) else ' '.join(pattern))}"
    )
    if rare := out.figures.get("left_out"):
        yield (
            f"{rare['unique']:,} rare pretokens, {100 * rare['share']:.2f} % of all occurrences, were left out "
            f"(`tokenizer.min_count` is {config.min_count})."
        )
    if superwords := out.figures.get("superwords"):
        yield (
            f"The last {superwords['merges']:,} merges may cross words. They were learned from "
            f"{superwords['tokens']:,} tokens; each pair occurred at least {superwords['min_frequency']:,} times."
        )
    sentence = (
        "Once upon a time there wasn't any tokenizer: in 1994 «byte pair encoding» only compressed files. "
        "Naïve café, 東京 and 🙂 cost more tokens than plain words do."
    )
    tokens = token_texts(tokenizer, sentence)
    yield f"### A sentence in {len(tokens)} tokens\n\n" + token_picture(tokens)
    lengths = {
        token_id: len(tokenizer.vocab[token_id]) for token_id in tokenizer.vocab.keys() - tokenizer.special_ids.values()
    }
    histogram_of_lengths = np.bincount(list(lengths.values()))
    edges = np.arange(len(histogram_of_lengths) + 1) - 0.5
    yield histogram("Length of the tokens", "bytes", histogram_of_lengths, edges, "token ids")
    longest = sorted(lengths, key=lambda token_id: (-lengths[token_id], token_id))[:20]
    rows = [(str(token_id), code(tokenizer.vocab[token_id]), lengths[token_id]) for token_id in longest]
    yield "### Longest tokens\n\n" + table(("id", "token", "bytes"), rows)


def comparison_page(comparison: "Comparison") -> Iterator[str]:
    """Show the compression, the speed and the use of the vocabulary of each tokenizer, with two pictures."""
    names = list(map(escape_markdown, comparison.tokenizers))

    def text_table(figure_of: Callable[[str, str], Any]) -> str:
        rows = [(text, *(figure_of(text, name) for name in comparison.tokenizers)) for text in comparison.texts]
        return table(("text", *names), [(escape_markdown(text), *figures) for text, *figures in rows])

    def chart(label: str, figure_of: Callable[[str, str], float]) -> str:
        figure, axes = new_figure("", "", label, size=(11, 3.4))
        series = {name: [figure_of(text, name) for text in comparison.texts] for name in comparison.tokenizers}
        draw_bars(axes, list(comparison.texts), series, "%.3g")
        return embed_figure(figure, label)

    def percent(share: float | None) -> str:
        return "–" if share is None else f"{100 * share:.1f} %"

    yield f"{escape_markdown(describe(comparison))}."
    yield "## Bytes per token\n\n" + chart("Bytes per token", comparison.bytes_per_token)
    rows = [(escape_markdown(text), *figures) for text, *figures in compression_rows(comparison)]
    yield table(("text", "bytes", *names), rows)
    yield "More bytes per token: fewer tokens to train on, and more text in a context."
    yield "### Characters per token\n\n" + text_table(
        lambda text, name: comparison.texts[text][1] / comparison.tokenizers[name].encodings[text].tokens
    )
    yield "## Speed\n\n" + chart("MB per second", comparison.megabytes_per_second)
    yield text_table(comparison.megabytes_per_second)
    yield "Megabytes per second of `encode` in one thread, the fastest of three."
    yield "## Words and vocabulary\n\nShare of words (runs of letters) that are more than one token:"
    yield text_table(lambda text, name: percent(comparison.tokenizers[name].encodings[text].split_words))
    yield "Use of the vocabulary:"
    rows = [
        (name, part.size, part.used, percent(part.used / part.size), " ".join(map(code, part.longest)))
        for name, part in zip(names, comparison.tokenizers.values(), strict=True)
    ]
    yield table(("tokenizer", "tokens", "in the texts", "share", "longest tokens with letters"), rows)


def loss_page(losses: "Mapping[str, LossAtFlops]") -> Iterator[str]:
    """Show the bits per byte of the models that were trained with each tokenizer."""
    yield "## Bits per byte at equal FLOPs"
    rows = [(escape_markdown(name), *row) for name, *row in loss_rows(losses)]
    yield table(("tokenizer", "bits per byte", "standard error", "seeds", "FLOPs", "steps", "tokens"), rows)
    yield (
        "Bits per byte of the texts, which were held out, by small models of one architecture with the FLOPs of the "
        "table each. Less is better. Bytes per token tell the cost of serving, bits per byte the loss."
    )


def loss_rows(losses: "Mapping[str, LossAtFlops]") -> list[tuple[Any, ...]]:
    """Return a row for each tokenizer: its name, bits per byte, their standard error, and the seeds, FLOPs, steps and
    tokens of its trainings."""
    return [
        (
            name,
            f"{loss.bits_per_byte:.4f}",
            "–" if loss.error is None else f"{loss.error:.4f}",
            len(loss.seeds),
            f"{loss.flops:.3e}",
            loss.steps,
            loss.tokens,
        )
        for name, loss in losses.items()
    ]


def describe(comparison: "Comparison") -> str:
    """Return in one line what was compared."""
    return f"{', '.join(comparison.tokenizers)} on {', '.join(comparison.texts)}"


def compression_rows(comparison: "Comparison") -> list[tuple[Any, ...]]:
    """Return a row for each text: its name, its bytes, and the bytes per token of each tokenizer."""
    return [
        (text, size, *(comparison.bytes_per_token(text, name) for name in comparison.tokenizers))
        for text, (size, _) in comparison.texts.items()
    ]
