"""The stages that train a small model with each tokenizer of a comparison, at equal FLOPs.

The text, the architecture and the recipe are the same: those that the stage ``budget`` chooses for the text. The models
are trials, as in a sweep, and so cached.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flows.config import PipelineConfig
from flows.pipeline import ChunkedText, cut_text, encode_text
from flows.plan import Executor
from flows.text import find_text, read_text
from lm.experiments.config import Budget
from lm.experiments.equal_flops import LossAtFlops, spend_flops, summarize_trials
from lm.experiments.trial import TrialConfig, TrialResult, from_json
from tasks.budget import budget, machine_kind, read_choice
from tasks.import_tokenizer import find_tokenizer_files, import_tokenizer, read_tokenizer
from tasks.runs.models import find_tokenizer
from tasks.runtime.output import Output, Ref, read_output
from tasks.runtime.store import Store
from tasks.trial import trial


def measure_losses(
    config: PipelineConfig, tokenizers: Mapping[str, str], flops: float, seeds: int, executor: Executor
) -> dict[str, LossAtFlops]:
    """Train ``seeds`` models of ``flops`` each on ``config.data`` with each tokenizer. Return their losses by label.

    ``tokenizers`` are names by label, see :func:`tasks.runs.models.find_tokenizer`. Raises UserError if the text or the
    budget is too small, and for a tokenizer that does not split bytes.
    """
    separator = config.data.separator
    inputs = executor.find_inputs(find_text)
    # All vocabularies are known before the first training, so that none is too large for the budget.
    encoded: dict[str, tuple[Any, ...]] = {}
    for label, name in tokenizers.items():
        found = find_tokenizer(name, executor.run.store.base)
        if isinstance(found, Output):
            tokenizer = found.ref
        else:
            files = find_tokenizer_files(found, executor.run.store)
            tokenizer = executor.call(import_tokenizer, files, separator, title=f"tokenizer {label}")
        specials, pattern = executor.read(read_tokenizer, tokenizer, separator, label)
        texts, train_texts, valid_texts = read_text(config, inputs, specials, executor)
        if not encoded:  # the other texts differ in special tokens at most
            amount = Budget(flops, "flops")
            choice = executor.finish(executor.call(budget, texts, amount, machine_kind(config.execution)))
            chunks, chosen, model, train = executor.read(read_choice, choice, config.tokenizer)
        cut = cut_text(train_texts, valid_texts, specials, pattern, chunks, executor)
        text = ChunkedText(*cut, specials, pattern, chosen, model, train, (tokenizer, tokenizer))
        shards = encode_text(config, text, tokenizer, executor)
        size = executor.read(_read_vocab_size, shards[0])
        encoded[label] = *shards, tokenizer, spend_flops(flops, model, train, size, label)
    losses = {}
    for label, (*arguments, (model, train)) in encoded.items():
        trials = []
        for seed in range(seeds):
            title = f"{label}, seed {seed}"
            executor.log("Training with %s: %d steps.", title, train.steps)
            point = TrialConfig(model, replace(train, seed=seed), title=title)
            trials.append(executor.call(trial, point, *arguments, title=f"trial {title}"))
        losses[label] = summarize_trials([executor.read(_read_trial, ref) for ref in trials], label)
        executor.finish(trials[-1])
    return losses


def _read_vocab_size(store: Store, index: Ref) -> int:
    return int(read_output(store, index).json("index.json")["vocab_size"])


def _read_trial(store: Store, ref: Ref) -> TrialResult:
    return from_json(read_output(store, ref).json("trial.json"))
