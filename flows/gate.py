"""What a gate asks of its configuration: the points of both arms, and the file of the variant."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flows.config import PipelineConfig, read_yaml
from lm.common.errors import UserError
from lm.experiments.axes import Settings, get_option, read_numbers
from lm.experiments.config import GateConfig

_SECTIONS = ("model", "train")
_REFUSED = {
    "train.seed": "the gate sets the seeds of both arms",
    "train.init_from": "the gate trains new models",
    "train.max_seconds": "the gate compares at equal tokens",
    "train.patience": "the gate compares at equal tokens",
    "model.vocab_size": "both arms have the same tokenizer",
}


def gate_grid(gate: GateConfig, base: PipelineConfig) -> list[Settings]:
    """Return the settings of all trainings; without a variant, those of the baseline."""
    from lm.experiments.gate import plan_trainings  # imports numpy

    first, steps = base.train.seed, base.train.steps
    return [training.settings(gate, first, steps) for training in plan_trainings(gate)]


def read_variant(path: Path) -> dict[str, Any]:
    """Return the options in the YAML file of a variant, by their names: ``train.beta2: 0.99``, or ``beta2`` in a
    section ``train``. Raises UserError if the file has none, or an option twice."""
    content = read_yaml(path)
    if not isinstance(content, dict) or not content:
        raise UserError(f"{path} must have the options of the variant, such as train.beta2: 0.99.")
    options: dict[str, Any] = {}
    for name, value in content.items():
        section = value if name in _SECTIONS and isinstance(value, dict) else {"": value}
        for key, inner in section.items():
            option = f"{name}.{key}" if key else name
            if option in options:
                raise UserError(f"{path}: the option {option} is given twice.")
            options[option] = read_numbers(inner)
    return options


def check_gate(gate: GateConfig, base: PipelineConfig, derive: Mapping[str, Any]) -> None:
    """Raise UserError if the sizes or the variant set what they may not, or if there is no validation text."""
    if not (base.data.valid or base.data.valid_fraction):
        raise UserError(
            "A gate compares losses of validation text, which this sweep lacks; set data.valid or data.valid_fraction."
        )
    fields = asdict(base)
    for part, options in (("gate.sizes", [*gate.sizes[0], *gate.sizes[1]]), ("The variant", [*gate.variant])):
        for option in options:
            if part == "gate.sizes" and "." not in option:
                continue  # a variable
            if option.partition(".")[0] not in _SECTIONS:
                raise UserError(
                    f"{part} sets {option}; both arms read the same text and differ in options of the sections model "
                    "and train only."
                )
            if option in _REFUSED:
                raise UserError(f"{part} sets {option}; leave it out: {_REFUSED[option]}.")
            try:
                get_option(fields, option)
            except UserError as error:
                raise UserError(f"{part} is not valid: {error}") from None
            if part == "gate.sizes" and option in derive:
                raise UserError(f"{part} sets {option}, which the sweep derives; leave one of them out.")
    if "train.steps" in derive:
        raise UserError("A gate sets train.steps of its trainings; set it in gate.sizes, and derive others from it.")


def check_pair(baseline: PipelineConfig, variant: PipelineConfig, size: int) -> None:
    """Raise UserError if the arms of a size are equal, or do not read as many tokens."""
    if (baseline.model, baseline.train) == (variant.model, variant.train):
        raise UserError(
            f"The variant equals the baseline at size {size}: each of its options has the same value there."
        )
    tokens = [
        config.train.steps * config.train.batch_size * config.model.context_length for config in (baseline, variant)
    ]
    if tokens[0] != tokens[1]:
        raise UserError(
            f"At size {size} the variant reads {tokens[1]:,} tokens and the baseline {tokens[0]:,}; the gate compares "
            "at equal tokens. Change train.steps of the variant, or leave out its train.batch_size and "
            "model.context_length."
        )
