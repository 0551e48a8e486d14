"""The configuration of a sweep, read from a YAML file, and its points."""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from flows.config import FlowConfig, PipelineConfig, merge_fields, read_yaml, why_not_curated
from flows.gate import check_gate, check_pair, gate_grid, read_variant
from lm.common.config import bounded_field
from lm.common.errors import UserError, did_you_mean
from lm.experiments.axes import (
    MODEL_COSTS,
    Axis,
    Point,
    Settings,
    corners,
    describe_settings,
    expand,
    get_option,
    make_point,
    read_numbers,
    set_option,
)
from lm.experiments.config import GateConfig, LawConfig, MixtureConfig, RecordConfig, SearchConfig
from tasks.runtime.execution import Execution

SweepStage = Literal[
    "ingest",
    "classifier",
    "filter",
    "deduplicate",
    "repeats",
    "decontaminate",
    "chunk",
    "count",
    "merge",
    "encode",
    "train",
    "trial",
    "scaling_law",
    "mixture_law",
    "gate",
    "sweep",
]

_FILE_FIELDS = {
    *("description", "base", "set", "axes", "derive", "search", "law", "mixture", "gate", "record"),
    *("max_epochs", "sizes"),
}
_MERGED_FIELDS = ("set", "derive")  # a size adds to them; it replaces the others


def with_trials(refresh: tuple[SweepStage, ...]) -> tuple[SweepStage, ...]:
    """Return the stages to run again. The trainings of a sweep are trials: a refresh of train includes them."""
    return (*refresh, "trial") if "train" in refresh else refresh


@dataclass(frozen=True)
class SweepConfig(FlowConfig):
    """Configuration of the flow ``sweep``: many trainings that differ in some options."""

    STAGES = get_args(SweepStage)
    PRESETS = PipelineConfig.PRESETS / "sweeps"

    name: str = "sweep"
    """Name of this sweep, part of the names of artifacts in Prefect. It has no effect on results."""
    description: str = ""
    """A few sentences for the page: the question that the sweep answers."""
    base: PipelineConfig = field(default_factory=PipelineConfig)
    """Configuration of the pipeline that all points share, except for what they vary."""
    axes: list[Axis] = field(default_factory=list)
    """Options that vary. The points are all combinations of their values; with a search, some of them."""
    derive: dict[str, str | int | float] = field(default_factory=dict)
    """Options that follow from others: an expression such as 2 * train.batch_size by option."""
    search: SearchConfig | None = None
    """Search for the best point, by the library Optuna. Default: train all points."""
    law: LawConfig | None = None
    """Fit a scaling law to the points. Off by default."""
    mixture: MixtureConfig | None = None
    """Train on different mixtures of the sources of ``data.mix``, in place of axes, and find the best weights. Off by
    default."""
    gate: GateConfig | None = None
    """Compare a variant with the baseline at two sizes, in place of axes, and accept it only if it is shown to be
    faster. Off by default."""
    record: RecordConfig | None = None
    """Compare the mean loss of all points with a published one. The points differ in train.seed alone. Off by
    default."""
    max_epochs: float | None = bounded_field(None, gt=0, lt=math.inf)
    """Maximum number of times that a training may read the training text. A point with more is refused. Default: no
    limit."""

    @property
    def execution(self) -> Execution:
        """How the work runs on this machine."""
        return self.base.execution

    @property
    def data(self) -> Any:
        """Sources of the text of the base."""
        return self.base.data

    @property
    def varied(self) -> list[str]:
        """Options and variables of the axes, or of the sizes of a gate, in their order."""
        if self.gate:
            return list(dict.fromkeys(["arm", *self.gate.sizes[0], *self.gate.sizes[1]]))
        return [name for axis in self.axes for name in axis.names]

    def __post_init__(self) -> None:
        """Raise UserError, which names the point, if a point of the sweep is not valid."""
        for part, kind in ((self.mixture, "mixture"), (self.gate, "gate")):
            if part and (self.axes or self.search or self.law or (self.mixture and self.gate)):
                raise UserError(
                    f"The sweep {self.name} has a {kind}, which chooses its points; leave out axes, search and law, "
                    "and all but one of mixture and gate."
                )
        if self.mixture:
            self._check_mixture(self.mixture)
        elif self.gate:
            check_gate(self.gate, self.base, self.derive)
        elif not self.axes:
            raise UserError(f"The sweep {self.name} has no axes; name at least one option that varies.")
        if self.execution.train_deployment:
            raise UserError("execution.train_deployment does not work in a sweep; use execution.runner dask or ray.")
        if self.base.budget:
            raise UserError("A sweep chooses the configurations of its points itself; leave the budget out.")
        names = {*self.derive, *self.varied}
        if "point" in names:
            raise UserError(f"The sweep {self.name} has a variable point; the table has a column of that name.")
        if taken := sorted(names.intersection(MODEL_COSTS)):
            raise UserError(f"The sweep {self.name} has a variable {taken[0]}; in expressions, that is the model's.")
        if self.search:
            self._check_search(self.search, names)
        if self.law:
            self._check_law(self.law)
        if self.record and self.varied != ["train.seed"]:
            raise UserError(f"The sweep {self.name} has a record; only train.seed may vary, on one axis.")
        points = [
            self.point(settings, f"point {number}")
            for number, settings in enumerate(corners(self.axes) if self.search else self.grid(), start=1)
        ]
        for point, option in itertools.product(points, ("max_seconds", "patience")):
            if (self.law or self.gate) and point.config["train"][option]:
                raise UserError(f"A law needs trainings of a known cost; set no train.{option}.")
        if self.gate and self.gate.variant:
            configs = [pipeline_config(point) for point in points[:4]]
            for size, pair in enumerate(zip(configs[::2], configs[1::2], strict=True), start=1):
                check_pair(*pair, size)
        if self.law and self.law.check_budget:
            for size in self.law.check_sizes:
                first = expand(self.axes)[0]
                self.point(first | {self.law.budget: self.law.check_budget, self.law.size: size}, "the check")

    def _check_mixture(self, mixture: MixtureConfig) -> None:
        names, data = self.base.data.named_sources, self.base.data
        if len(names) < 2:
            raise UserError(
                f"The sweep {self.name} has a mixture of {len(names)} sources; name two or more in data.mix."
            )
        if data.valid or not data.valid_fraction:
            raise UserError(
                f"The sweep {self.name} has a mixture, which measures each source on its own validation text; leave "
                "out data.valid, and set data.valid_fraction above 0."
            )
        if unknown := sorted(mixture.target.keys() - names):
            raise UserError(
                f"mixture.target has a weight of {unknown[0]}{did_you_mean(unknown[0], names)}; data.mix has no such "
                "source."
            )
        from lm.curate.mixture_law import runs_needed  # slow to import

        if mixture.runs < (needed := runs_needed(len(names)) + 1):
            raise UserError(
                f"mixture.runs is {mixture.runs}; a law of {len(names)} sources that predicts each training from the "
                f"others needs {needed}."
            )
        if mixture.min_weight * len(names) >= 1:
            raise UserError(f"mixture.min_weight {mixture.min_weight} must be below 1 / {len(names)}, for each source.")

    def _check_search(self, search: SearchConfig, names: set[str]) -> None:
        if self.law:
            raise UserError(f"The sweep {self.name} has a search and a law; a law needs all points of the grid.")
        progress = {"train.steps", "train.batch_size", "model.context_length"}  # how far a training is at a step
        if search.prune and (varied := sorted(names & progress)):
            raise UserError(
                f"The search compares trainings at equal steps to prune them, and {varied[0]} varies: such trainings "
                "do not compare. Set prune: false in the search."
            )
        if any(name.startswith("data.") for name in names):
            raise UserError("A search varies no option of the section data; use a grid, or a sweep for each text.")

    def _check_law(self, law: LawConfig) -> None:
        if law.check_budget and any(name.startswith("data.") for name in self.derive):
            raise UserError("The training that checks a law reads the text of the points; derive no option of data.")
        points = expand(self.axes)
        if missing := [name for name in (law.budget, law.size) if any(name not in point for point in points)]:
            raise UserError(f"The law of the sweep {self.name} reads {missing[0]}, which not every point sets.")
        for name, point in itertools.product((law.budget, law.size), points):
            value = point[name]
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
                raise UserError(f"The law of the sweep {self.name} needs numbers above 0, and {name} is {value!r}.")

    def why_missing(self, stage: str) -> str:
        """Return why a run with this configuration has no such stage; empty if it has one."""
        for name, part in {"scaling_law": "law", "mixture_law": "mixture", "gate": "gate"}.items():
            if stage == name and not getattr(self, part):
                return f"There is no stage {stage}: the sweep {self.name} has no {part}."
        return why_not_curated(self.base, stage)

    def check_stages(self, until: str | None, refresh: Sequence[str]) -> None:
        """Raise UserError as the base class does, and for a gate without a variant."""
        super().check_stages(until, refresh)
        if self.gate and not self.gate.variant:
            raise UserError(f"The sweep {self.name} needs a variant: --variant FILE, a YAML file of its options.")

    def stage_names(self) -> list[str]:
        """Return the names of the stages of a run in their order, trial once for each point. Trials train models."""
        times = {"train": 0, "trial": 1 if self.search else len(self.grid())}
        return [name for name in super().stage_names() for _ in range(times.get(name, 1))]

    def points(self) -> list[Point]:
        """Return all points, in the order of the grid."""
        return [self.point(settings, f"point {number}") for number, settings in enumerate(self.grid(), start=1)]

    def grid(self) -> list[Settings]:
        """Return the settings of all points: all combinations of the axes, the weights of a mixture, or the arms of a
        gate."""
        if self.gate:
            return gate_grid(self.gate, self.base)
        if not self.mixture:
            return expand(self.axes)
        from lm.curate.mixture_law import design_weights  # slow to import

        mixture, sources, steps = self.mixture, self.base.data.named_sources, self.base.train.steps
        design = design_weights(mixture.runs - 1, len(sources), mixture.min_weight)
        mixtures: list[list[float | None]] = [[None] * len(sources)]
        mixtures += [[*weights] for weights in design]
        return [
            self.mix_settings(weights, max(1, round(length * steps))) | self.without_epoch_limits
            for weights, length in zip(mixtures, itertools.cycle(mixture.lengths), strict=False)
        ]

    @property
    def without_epoch_limits(self) -> Settings:
        """The settings that a training of the law has in place of ``data.mix.NAME.max_epochs``."""
        sources = self.base.data.named_sources
        return {f"data.mix.{name}.max_epochs": None for name, source in sources.items() if source.max_epochs}

    def mix_settings(self, weights: Sequence[float | None], steps: int) -> Settings:
        """Return the settings of a training with these weights of the sources. None: in natural proportions."""
        settings: Settings = {
            f"data.mix.{name}.weight": weight
            for name, weight in zip(self.base.data.named_sources, weights, strict=True)
        }
        return settings | ({} if steps == self.base.train.steps else {"train.steps": steps})

    def point(self, settings: Settings, name: str) -> Point:
        """Return the point with these settings of the axes. Raises UserError, with its ``name``, if it is not valid."""
        try:
            settings = {option: read_numbers(value) for option, value in settings.items()}
            derive = self.derive
            if self.gate:  # what a variant sets is not derived
                derive = {option: expression for option, expression in derive.items() if option not in settings}
            point = make_point(self._base_fields, settings, derive)
            if pipeline_config(point).train.init_from:
                raise UserError("the points of a sweep train new models; leave train.init_from out")
        except UserError as error:
            place = f"{name} ({describe_settings(settings)})"
            raise UserError(f"The sweep {self.name} has an invalid point, {place}: {error}") from None
        return point

    @functools.cached_property
    def _base_fields(self) -> dict[str, Any]:
        return asdict(self.base)


def pipeline_config(point: Point) -> PipelineConfig:
    """Return the configuration of the pipeline at a point. Raises UserError if it is not valid."""
    return PipelineConfig.validate(point.config)


def load_sweep(name: str, size: str = "") -> SweepConfig:
    """Return a sweep that ships with textmill, or that of a YAML file, with a size of it.

    ``size`` is one of the file's ``sizes``; empty is the first. Raises UserError if there is no such sweep or size, or
    if it is not valid.
    """
    path = _find_file(name)
    fields = _read(path)
    sizes = fields.pop("sizes", None) or {}
    if size and size not in sizes:
        known = f"Sizes: {', '.join(sizes)}." if sizes else "It has no sizes; leave --size out."
        raise UserError(f"The sweep {name} has no size {size!r}{did_you_mean(size, sizes)}. {known}")
    chosen = size or next(iter(sizes), "")
    for key, value in (sizes[chosen] or {}).items() if sizes else ():
        fields[key] = {**(fields.get(key) or {}), **value} if key in _MERGED_FIELDS else value
    content = {"name": f"{path.stem}-{chosen}" if chosen else path.stem, **fields}
    try:
        base = _base_config(str(content.pop("base", None) or "demo"), path.parent, content.pop("set", None) or {})
        return SweepConfig.validate(content | {"base": base})
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _find_file(name: str) -> Path:
    """Return the file of a sweep: of one that ships, or a file of the user's own."""
    names = SweepConfig.preset_names()
    if name in names:
        return SweepConfig.preset_path(name)
    with suppress(OSError, RuntimeError):  # a name that is too long, or the home of an unknown user
        path = Path(name).expanduser()
        if path.suffix in (".yaml", ".yml") and path.is_file():
            return path
    raise UserError(
        f"There is no sweep {name!r}{did_you_mean(name, names)}: neither one of {', '.join(names)}, nor a .yaml file."
    )


def _read(path: Path) -> dict[str, Any]:
    content = read_yaml(path, are_number_keys_text=True)  # the name of a size may be a number
    sizes = (content.get("sizes") or {}) if isinstance(content, dict) else {}
    if not isinstance(content, dict) or not isinstance(sizes, dict):
        raise UserError(f"{path} must have fields such as base, axes and sizes; see docs/experiments.md.")
    for fields in (content, *(size or {} for size in sizes.values())):
        if not isinstance(fields, dict) or not all(isinstance(fields.get(name) or {}, dict) for name in _MERGED_FIELDS):
            raise UserError(f"{path}: set and derive have a value for each option; see docs/experiments.md.")
        if unknown := [name for name in fields if name not in _FILE_FIELDS]:
            raise UserError(f"{path} has an unknown field {unknown[0]!r}{did_you_mean(unknown[0], _FILE_FIELDS)}.")
    return content


def _base_config(base: str, folder: Path, options: Mapping[str, Any]) -> PipelineConfig:
    """Return a preset, or the configuration of a YAML file, with options such as train.steps replaced.

    The path of a file is relative to ``folder``. What the file leaves out is as in the preset ``demo``, as for
    ``textmill run --config``.
    """
    if Path(base).suffix in (".yaml", ".yml"):
        try:
            path = folder / Path(base).expanduser()
        except RuntimeError as error:
            raise UserError(f"The base {base} cannot be found: {str(error).rstrip('.')}.") from None
        content = read_yaml(path)
        if isinstance(content, dict):
            content = merge_fields(PipelineConfig, asdict(PipelineConfig.load_preset("demo")), content)
        try:
            config = PipelineConfig.validate(content)
        except UserError as error:
            raise UserError(f"The base {path} is not valid: {error}") from None
    else:
        config = PipelineConfig.load_preset(base)
    fields = asdict(config)
    for name, value in options.items():
        set_option(fields, name, value)
    return PipelineConfig.validate(fields)


def with_base(config: SweepConfig, base: PipelineConfig) -> SweepConfig:
    """Return a sweep with another base. Raises UserError if it sets an option that the sweep varies or derives."""
    before, after = asdict(config.base), asdict(base)
    for name in (*config.varied, *config.derive):
        if "." in name and get_option(before, name) != get_option(after, name):
            raise UserError(f"The sweep {config.name} varies {name} itself; leave --{name} out, or edit its file.")
    return replace(config, base=base)


def with_gate(config: SweepConfig, variant: str, seeds: int | None) -> SweepConfig:
    """Return a sweep whose gate has the variant of a file, if one is named, and this number of seeds, unless it is
    None. Raises UserError if the sweep has no gate."""
    if not variant and seeds is None:
        return config
    if not config.gate:
        option = "--variant" if variant else "--seeds"
        raise UserError(f"{option} is for a sweep with a gate, and {config.name} has none; leave it out.")
    gate = config.gate
    try:
        options = read_variant(Path(variant).expanduser()) if variant else gate.variant
        return replace(config, gate=replace(gate, variant=options, seeds=gate.seeds if seeds is None else seeds))
    except RuntimeError as error:  # the home of an unknown user
        raise UserError(f"The variant {variant} cannot be found: {str(error).rstrip('.')}.") from None
