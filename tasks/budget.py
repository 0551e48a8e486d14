"""Stage ``budget``: choose vocabulary, model and training for a text, a budget and a machine."""

import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import yaml

from lm.experiments.config import Budget
from lm.hardware.memory import machine_memory
from lm.model.config import ModelConfig
from lm.text.config import ChunkConfig
from lm.tokenizer.config import TokenizerConfig
from lm.train.config import TrainConfig
from tasks.pages import training as pages
from tasks.runtime.execution import Execution
from tasks.runtime.locks import training_slot
from tasks.runtime.output import Output, Ref, read_output
from tasks.runtime.run_context import Attempt
from tasks.runtime.stage import stage
from tasks.runtime.store import Store

log = logging.getLogger(__name__)


@stage("budget", page=pages.budget, slot=training_slot)
def budget(out: Attempt, texts: Output, amount: Budget, machine: str) -> None:
    """Write ``choice.json`` and ``config.yaml``. ``machine`` is its kind: another one has another speed."""
    from lm.experiments.budget import choose_configuration
    from lm.experiments.speed import find_largest_batch, guess_flops_per_second, measure_speed

    statistics, execution = texts.json("text_groups.json")["statistics"], out.run.execution
    train_bytes, valid_bytes = (statistics[split]["bytes"] for split in ("train", "valid"))
    choice = choose_configuration(
        amount,
        train_bytes,
        valid_bytes,
        execution.workers,
        execution.processes,
        partial(guess_flops_per_second, execution),
        partial(measure_speed, execution=execution),
        partial(find_largest_batch, execution=execution),
    )
    model = replace(choice.model, vocab_size=None)  # that of the tokenizer, which a small text may make smaller
    content = {"vocab_size": choice.vocab_size, "model": asdict(model), "train": asdict(choice.train)}
    out.write_json("choice.json", content)
    sections = {  # with every field: those that are left out of a --config file have the values of a preset
        "chunk": asdict(ChunkConfig()),
        "tokenizer": {"vocab_size": choice.vocab_size},
        "model": content["model"],
        "train": content["train"],
    }
    text = "".join(f"# {reason}\n" for reason in choice.reasons) + yaml.safe_dump(sections, sort_keys=False)
    path = out.directory / "config.yaml"
    path.write_text(text, encoding="utf-8")
    out.figures = {"machine": machine, "vocab_size": choice.vocab_size, "steps": choice.train.steps}
    log.info("The budget buys (in %s):\n%s", path, text.rstrip())


def machine_kind(execution: Execution) -> str:
    """Return what decides the speed and the size of this machine's trainings: the number and the kind of its CPUs or
    GPUs, the memory of CPUs, the processes that train, and the options of the execution that are not the default."""
    from lm.hardware.device import choose_device

    device, usual = choose_device(execution.device), Execution()
    names = ("attention", "compile", "activation_checkpointing", "parallel")
    values = {name: getattr(execution, name) for name in names}
    options = "".join(f", {name} {value}" for name, value in values.items() if value != getattr(usual, name))
    if device.type == "cuda":
        import torch

        return f"{execution.processes} x {torch.cuda.get_device_name(device)}{options}"
    import llvmlite.binding

    shared = f" in {execution.processes} processes" if execution.processes > 1 else ""
    cpus = f"{execution.workers} x {llvmlite.binding.get_host_cpu_name()}, {machine_memory() >> 30} GiB"
    return f"{device.type}: {cpus}{shared}{options}"


def read_choice(store: Store, choice: Ref, tokenizer: TokenizerConfig) -> Sequence[Any]:
    """Return the configurations that the stages chunk, merge and train take, of the output of ``budget``."""
    content = read_output(store, choice).json("choice.json")
    return [
        ChunkConfig(),
        replace(tokenizer, vocab_size=content["vocab_size"]),
        ModelConfig(**content["model"]),
        TrainConfig(**content["train"]),
    ]
