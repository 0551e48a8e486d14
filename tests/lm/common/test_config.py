"""Bounds of the configuration: the constructors and the JSON schema of Prefect's form enforce the same ones."""

import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, fields, is_dataclass, make_dataclass
from typing import Any, get_args, get_type_hints

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

import lm.common.execution
from flows.config import PipelineConfig
from lm.common.config import PYDANTIC_CONFIG, bounded_field, validate_fields
from lm.common.errors import UserError
from lm.model.config import ModelConfig
from tasks.runtime.execution import Execution

SECTIONS: dict[str, Any] = {name: kind for name, kind in get_type_hints(PipelineConfig).items() if is_dataclass(kind)}
SCHEMA = TypeAdapter(PipelineConfig).json_schema()

# Listed explicitly, so that the loss of a bound fails a test. "(0" means above 0, "[0" at least 0.
EXPECTED = {
    "data": {"valid_fraction": "[0, 1)", "valid_max_bytes": "[0"},
    "filter": {"min_language_score": "[0, 1]"},
    "deduplicate": {
        "jaccard_threshold": "(0, 1]",
        "num_hashes": f"[1, {1 << 16}]",
        "num_bands": "[1",
        "ngrams": "[1",
    },
    "decontaminate": {"ngrams": "[2, 64]"},
    "chunk": {"target_bytes": "[1"},
    "tokenizer": {"vocab_size": "[256", "min_frequency": "[1", "min_count": "[1", "superwords": "[0"},
    "model": {
        "vocab_size": "[1",
        "context_length": f"[1, {1 << 24}]",
        "d_model": "[2",
        "num_layers": "[1",
        "num_heads": "[1",
        "num_kv_heads": "[1",
        "head_dim": "[2",
        "d_ff": "[1",
        "rope_theta": "(0, inf)",
        "norm_eps": "[0, inf)",
        "logit_softcap": "[0, inf)",
        "rotary_fraction": "",  # a tiny part of a head has no pair
        "global_interval": "[2",
        "sliding_window": "[1",
        "local_rope_theta": "(0, inf)",
        "attention_softcap": "[0, inf)",
    },
    "adapter": {"rank": f"[0, {1 << 16}]", "alpha": "(0, inf)", "dropout": "[0, 1)"},
    "train": {
        "steps": "[1",
        "batch_size": "[1",
        "gradient_accumulation_steps": "[1",
        "max_seconds": "(0, inf)",
        "max_lr": "[0, inf)",
        "min_lr": "[0, inf)",
        "embedding_lr_scale": "(0, inf)",
        "head_lr_scale": "(0, inf)",
        "vector_lr_scale": "(0, inf)",
        "vector_beta2": "[0, 1)",
        "average_tail": "[0, 1]",
        "warmup_steps": "[0",
        "decay_fraction": "[0, 1]",
        "beta1": "[0, 1)",
        "beta2": "[0, 1)",
        "weight_decay": "[0, inf)",
        "max_grad_norm": "(0, inf)",
        "seed": f"[0, {1 << 63})",
        "eval_interval": "[1",
        "eval_sequences": "[1",
        "checkpoint_interval": "[1",
        "keep_checkpoints": "[1",
        "patience": "[1",
        "sample_tokens": "[0",
    },
    "sample": {
        "temperature": "[0, inf)",
        "top_k": "[0",
        "top_p": "[0, 1]",
        "min_p": "[0, 1]",
        "repetition_penalty": "(0, inf)",
        "max_new_tokens": "[0",
        "samples": "[1",
        "seed": "",
        "speculative_tokens": "[0",
    },
    "execution": {
        "threads": "[1",
        "threads_per_task": "[1",
        "tasks_in_flight": "[1",
        "processes": "[1",
        "max_trainings": "[0",
        "count_memory": "[16",
        "download_cache": "[0",
        "log_interval": "[1",
        "min_validations": "[1",
        "tensor_parallel": "[1",
    },
}
# Other fields of the section that must change for a value at the bound to be valid.
COMPANIONS: dict[str, dict[str, Any]] = {
    "deduplicate.num_hashes": {"num_bands": 1},
    "tokenizer.vocab_size": {"special_tokens": []},
    "model.d_model": {"num_heads": 1},
    "model.global_interval": {"sliding_window": 1},
    "model.local_rope_theta": {"global_interval": 2},
    "train.max_lr": {"min_lr": 0},
    "train.min_lr": {"max_lr": sys.float_info.max},
    "train.steps": {"warmup_steps": 0},
}
BOUNDED = [(section, name) for section, names in EXPECTED.items() for name, interval in names.items() if interval]


def edges(section: str, name: str) -> Iterator[tuple[Any, Any]]:
    """Yield (last valid value, first invalid value) for each bound of a field."""
    kind, interval = get_type_hints(SECTIONS[section])[name], EXPECTED[section][name]
    is_int = int in (kind, *get_args(kind))
    bounds = interval.strip("[]()").split(", ")
    for bound, bracket, outward in zip(bounds, (interval[0], interval[-1]), (-1, 1), strict=False):
        number = int(bound) if is_int else float(bound)
        outside = number + outward if is_int else math.nextafter(number, outward * math.inf)
        inside = number - outward if is_int else math.nextafter(number, -outward * math.inf)
        yield (number, outside) if bracket in "[]" else (inside, number)


def make(section: str, name: str, value: Any) -> Any:
    return SECTIONS[section](**{name: value, **COMPANIONS.get(f"{section}.{name}", {})})


def fits_schema(values: dict[str, Any]) -> bool:
    return jsonschema.Draft202012Validator(SCHEMA).is_valid(values)


def test_every_numeric_field_is_listed_here() -> None:
    numeric = {
        section: {name for name, kind in get_type_hints(config).items() if {int, float} & {kind, *get_args(kind)}}
        for section, config in SECTIONS.items()
    }
    assert numeric == {section: set(names) for section, names in EXPECTED.items()}


@pytest.mark.parametrize(("section", "name"), BOUNDED)
def test_a_number_is_accepted_at_its_bound_and_rejected_past_it(section: str, name: str) -> None:
    for inside, outside in edges(section, name):
        assert getattr(make(section, name, inside), name) == inside
        with pytest.raises(UserError, match=rf"^{section}\.{name} is {outside!r}; it must be "):
            make(section, name, outside)
    with pytest.raises(UserError, match=rf"^{section}\.{name} is nan; "):
        make(section, name, math.nan)


@pytest.mark.parametrize(("section", "name"), BOUNDED)
def test_the_schema_has_the_same_bounds(section: str, name: str) -> None:
    for inside, outside in edges(section, name):
        assert fits_schema({section: {name: inside}})
        assert outside == math.inf or not fits_schema({section: {name: outside}})  # JSON has no infinity


def test_a_misspelled_field_or_section_is_rejected() -> None:
    for section, names in EXPECTED.items():
        for name in names:
            value = getattr(SECTIONS[section](), name)
            assert fits_schema({section: {name: value}})
            misspelled = {section: {f"{name}s": value}}
            assert not fits_schema(misspelled)
            with pytest.raises(ValidationError, match=f"{name}s"):
                TypeAdapter(PipelineConfig).validate_python(misspelled)
    assert not fits_schema({"trian": {"steps": 3}})


def test_the_schema_describes_every_field() -> None:
    for name, section in {**SECTIONS, "all": PipelineConfig}.items():
        properties = TypeAdapter(section).json_schema()["properties"]
        assert properties.keys() == {field.name for field in fields(section)}
        assert all(schema.get("description") for schema in properties.values()), name


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("train", {"steps": 0}, "train.steps is 0; it must be at least 1."),
        ("model", {"rope_theta": -1}, "model.rope_theta is -1; it must be above 0 and below inf."),
        ("sample", {"top_p": 2}, "sample.top_p is 2; it must be between 0 and 1."),
        ("sample", {"temperature": math.inf}, "sample.temperature is inf; it must be at least 0 and below inf."),
        ("train", {"beta1": 1}, "train.beta1 is 1; it must be at least 0 and below 1."),
        ("execution", {"threads": 0}, "execution.threads is 0; it must be at least 1, or left out."),
        ("train", {"optimizer": "x"}, "train.optimizer is 'x'; it must be adamw, muon, normuon or soap_muon."),
        ("train", {"precision": None}, "train.precision is None; it must be auto, float32 or bfloat16."),
        ("data", {"invalid_utf8": "ignore"}, "data.invalid_utf8 is 'ignore'; it must be error or replace."),
        ("data", {"separator_in_document": ""}, "data.separator_in_document is ''; it must be error or remove."),
        ("train", {"min_lr": 1.0}, "train.min_lr 1.0 must not be above train.max_lr 0.001."),
    ],
)
def test_messages(section: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        SECTIONS[section](**values)
    assert str(caught.value) == message


def test_none_is_accepted_if_it_is_the_default() -> None:
    assert ModelConfig(vocab_size=None).vocab_size is None
    assert Execution(threads=None).threads is None


numbers = st.integers(-3, 3) | st.floats()
some_bounds = st.dictionaries(st.sampled_from(["ge", "gt", "le", "lt"]), st.integers(-2, 2), max_size=2)


@given(some_bounds, numbers)
def test_validate_fields_and_pydantic_agree(bounds: dict[str, Any], value: float) -> None:
    kind = make_dataclass(
        "Kind", [("x", float, bounded_field(0, **bounds))], namespace={"__pydantic_config__": PYDANTIC_CONFIG}
    )

    def passes(validate: Any) -> bool:
        try:
            validate()
        except (UserError, ValidationError):
            return False
        return True

    is_valid = passes(lambda: validate_fields(kind(value), "section"))
    assert is_valid == passes(lambda: TypeAdapter(kind).validate_python({"x": value}))


def test_a_job_file_may_have_the_settings_of_tasks() -> None:
    """Trainings that were started before have them in their job files."""
    execution = Execution(threads=2, runner="dask", count_memory=64)
    assert lm.common.execution.Execution.from_job(**asdict(execution)) == lm.common.execution.Execution(threads=2)
    with pytest.raises(TypeError, match="no_field"):
        lm.common.execution.Execution.from_job(no_field=1)


def test_the_form_describes_inherited_fields() -> None:
    assert all("description" in field for field in SCHEMA["$defs"]["Execution"]["properties"].values())
