"""What the flows read of the model that a training continues from, and of the teacher that it learns from."""

from collections.abc import Mapping, Sequence
from typing import Any

from lm.common.errors import UserError
from lm.files.checksum import loads_with_checksum
from lm.model.config import ModelConfig
from lm.train.config import continued_config
from tasks.runtime.output import Output, Ref, read_output
from tasks.runtime.store import Store


def read_start(store: Store, model: Ref, tokenizer: Ref, stated: Mapping[str, Any], separator: str) -> Sequence[Any]:
    """Return the special tokens and the pattern of the tokenizer, and the config of the model to train.

    ``stated`` are the fields of the model that the user set. Raises UserError if one conflicts with the model, and if
    ``separator`` is no special token.
    """
    from lm.tokenizer.tokenizer import Tokenizer

    config = continued_config(read_trained_config(read_output(store, model)), stated)
    loaded = Tokenizer.load(read_output(store, tokenizer).directory("tokenizer"))
    if separator not in loaded.special_tokens:
        known = ", ".join(map(repr, loaded.special_tokens)) or "none"
        raise UserError(
            f"data.separator {separator!r} is not among the special tokens of the model of train.init_from: {known}. "
            "Set data.separator to the one that ends a document."
        )
    return [loaded.special_tokens, loaded.pattern, config]


def check_teacher(store: Store, teacher: Ref, tokenizer: Ref, start: Ref) -> None:
    """Raise UserError if a ``teacher`` with this tokenizer has other token ids than the model ``start``."""
    from lm.tokenizer.tokenizer import Tokenizer

    vocab, own = (Tokenizer.load(read_output(store, ref).directory("tokenizer")).vocab for ref in (tokenizer, start))
    different = next((number for number in sorted({*own, *vocab}) if own.get(number) != vocab.get(number)), None)
    if different is None:
        return
    raise UserError(
        f"The teacher of distill.teacher has other tokens than the model that learns: {len(vocab):,} and {len(own):,}, "
        f"and the first that differs is {different}: {vocab.get(different)!r} and {own.get(different)!r}. "
        "Distillation compares probabilities of tokens, so name a teacher with the same tokenizer. A run of textmill "
        "must be post-trained, because the chat template adds tokens."
    )


def read_trained_config(model: Output) -> ModelConfig:
    """Return the config of a training's best checkpoint, without its weights. Raises UserError if it is damaged."""
    path = model.path(f"{model.best_checkpoint}/checkpoint.json")
    content = loads_with_checksum(path.read_bytes())
    if content is None:
        raise UserError(f"{path} is damaged. Run the pipeline again.")
    return ModelConfig(**content["model"])
