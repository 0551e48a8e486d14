"""The stages of the flow ``sweep`` in their order. This is the only description of the order.

The stages up to the shards are those of the pipeline, and shared by all points that agree on them. Each point is then a
trial, which trains a model by the pipeline's stage ``train``.
"""

import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple, get_args

from flows.chain import PIPELINE, Chain, Executor
from flows.config import PipelineConfig
from flows.plan import DryRunExecutor
from flows.sweep_config import SweepConfig, SweepStage, pipeline_config
from lm.common.errors import MachineError, UserError
from lm.experiments.axes import Point, corners
from lm.experiments.report import SweepReport
from lm.experiments.search import Search
from lm.experiments.trial import TrialConfig, TrialResult, from_json
from tasks.runtime.output import Ref, read_output
from tasks.runtime.stage import Stage
from tasks.runtime.store import Store
from tasks.scaling_law import scaling_law
from tasks.sweep import sweep
from tasks.train import train
from tasks.trial import trained_models, trial

log = logging.getLogger(__name__)


class SharedInputs(NamedTuple):
    """What the trials of some points read: the arguments of the stage ``trial`` after its config."""

    shards_index: Ref
    train_shards: list[Ref]
    valid_shards: list[Ref]
    tokenizer: Ref


class _UntilTraining:
    """An executor that keeps the arguments of the stage ``train`` instead of running it."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.arguments: tuple[Any, ...] = ()

    def call(self, stage: Stage, *arguments: Any, title: str = "") -> Ref:
        """Return the output of a stage."""
        if stage is not train:
            return self._executor.call(stage, *arguments, title=title)
        self.arguments = arguments
        return Ref(train.name, "")

    def read(self, function: Callable[..., Sequence[Any]], *arguments: Any) -> Sequence[Any]:
        """Return the items of a mapped stage."""
        return self._executor.read(function, *arguments)

    def map(self, stage: Stage, title: str, items: Sequence[Any], *arguments: Any) -> list[Ref]:
        """Return the outputs of a stage for all items."""
        return self._executor.map(stage, title, items, *arguments)


def _find_inputs(config: SweepConfig, store: Store) -> dict[str, Any]:
    """Return the sources of each text that points read."""
    bases = [config.base] if config.search else [pipeline_config(point) for point in config.points()]
    by_text = {_text_key(base): base for base in bases}
    return {key: PIPELINE.find_inputs(base, store) for key, base in by_text.items()}


def _text_key(config: PipelineConfig) -> str:
    return json.dumps(asdict(config.data), sort_keys=True)


class _Sweep:
    """One run of the stages: the points so far, and their trials."""

    def __init__(self, config: SweepConfig, inputs: dict[str, Any], executor: Executor) -> None:
        self.config, self.inputs, self.executor = config, inputs, executor
        self.points: list[Point] = []
        self.trials: list[Ref] = []
        self.law: list[Ref] = []
        self.check: list[Ref] = []
        self._shared: dict[str, tuple[SharedInputs, list[tuple[str, Ref]]]] = {}

    def share(self, point: Point) -> Iterator[tuple[str, Ref]]:
        """Run the stages up to the shards for a point, unless an earlier point has the same; yield them."""
        config = pipeline_config(point)
        if (key := _shared_key(config)) in self._shared:
            return
        executor, stages = _UntilTraining(self.executor), []
        for name, ref in PIPELINE.run(config, self.inputs[_text_key(config)], executor, train.name):
            if name != train.name:
                stages.append((name, ref))
                yield name, ref
        self._shared[key] = SharedInputs(*executor.arguments[:4]), stages

    def shared(self, point: Point) -> SharedInputs:
        """Return what the trial of a point reads."""
        return self._shared[_shared_key(pipeline_config(point))][0]

    def shared_stages(self, point: Point) -> list[tuple[str, Ref]]:
        """Return the stages up to the shards of a point."""
        return self._shared[_shared_key(pipeline_config(point))][1]

    def epochs(self, point: Point) -> float:
        """Return how many times a point reads the training text; 0 if the text is not encoded yet."""
        (tokens,) = self.executor.read(_count_train_tokens, self.shared(point).shards_index)
        config = pipeline_config(point)
        seen = config.train.steps * config.train.batch_size * config.model.context_length
        return seen / tokens if isinstance(tokens, int) else 0.0

    def check_epochs(self, points: Sequence[Point]) -> None:
        """Raise UserError for the first point that reads the training text more than ``max_epochs`` times."""
        limit = self.config.max_epochs
        for point in points if limit else ():
            if (epochs := self.epochs(point)) > (limit or math.inf):
                raise UserError(
                    f"The point with {point.title} reads the training text {epochs:.2f} times, and max_epochs is "
                    f"{limit:g}. Add text, or lower the steps."
                )

    def train(self, points: Sequence[Point]) -> None:
        """Run the trials of points: one after the other, or as many at once as the machine or the cluster may."""
        execution = self.config.execution
        self.check_epochs(points)
        trials: dict[int, Ref] = {}
        if execution.runner == "threads" and execution.max_trainings == 1:
            for index, point in enumerate(points):
                trials[index] = self._train_one(point, f"Point {index + 1} of {len(points)}")
        else:
            groups: dict[str, list[int]] = {}
            for index, point in enumerate(points):
                groups.setdefault(_shared_key(pipeline_config(point)), []).append(index)
            for indices in groups.values():
                configs = [_trial_config(points[index]) for index in indices]
                refs = self.executor.map(trial, "trial", configs, *self.shared(points[indices[0]]))
                if len(refs) != len(indices):  # a plan: some are not made yet
                    refs = refs[:1] * len(indices)
                trials |= dict(zip(indices, refs, strict=True))
        self.points += points
        self.trials += [trials[index] for index in range(len(points))]
        for point, ref in zip(points, self.trials[-len(points) :], strict=True):
            if refusal := self._read_refusal(point, ref):
                self._log("%s", refusal)

    def search(self, search: Search) -> None:
        """Run the trials of a search, each after the results of the earlier ones."""
        config = search.config
        for number in range(1, config.trials + 1):
            try:  # only the corners of the axes are checked before anything runs
                point = self.config.point(search.ask(), f"trial {number}")
                for _ in self.share(point):
                    pass
                self.check_epochs([point])
                ref = self._train_one(point, f"Trial {number} of {config.trials}", search.limits())
                if refusal := self._read_refusal(point, ref):
                    raise UserError(refusal)
            except MachineError:
                raise
            except UserError as error:
                if number == config.trials and not self.trials:
                    raise
                self._log("Trial %d is left out. %s", number, error)
                search.leave_out()
                continue
            self.points.append(point)
            self.trials.append(ref)
            (result,) = self.executor.read(_read_results, [ref])
            if not isinstance(result, TrialResult):  # a plan: this trial is not made yet
                return
            search.tell(result)

    def _train_one(self, point: Point, title: str, limits: dict[str, float] | None = None) -> Ref:
        self._log("%s: %s.", title, point.title)
        config, shared = _trial_config(point, limits), self.shared(point)
        name = f"trial {point.title}"
        if self.config.execution.runner == "threads":
            return self.executor.call(trial, config, *shared, title=name)
        return self.executor.map(trial, name, [config], *shared)[0]  # in a worker of the cluster

    def _read_refusal(self, point: Point, trial: Ref) -> str:
        """Return why a point cannot be trained; empty if it can, or is not tried yet."""
        (result,) = self.executor.read(_read_results, [trial])
        is_refused = isinstance(result, TrialResult) and result.state == "refused"
        return f"The point with {point.title} cannot be trained. {result.reason}" if is_refused else ""

    def _log(self, message: str, *values: Any) -> None:
        if not isinstance(self.executor, DryRunExecutor):
            log.info(message, *values)

    def check_law(self) -> None:
        """Fit the scaling law, and train the check of its prediction. Raises UserError if one is not possible."""
        config = self.config.law
        if config is None:
            return
        settings = [point.settings for point in self.points]
        law = self.executor.call(scaling_law, self.trials, settings, config)
        self.law = [law]
        (content,) = self.executor.read(_read_law, law)
        if not config.check_budget or isinstance(content, Ref):
            return
        best = settings[content["best_of_largest_budget"]]
        axes = {name: best[name] for axis in self.config.axes for name in axis.names if name in best}
        candidates = [
            self.config.point(axes | {config.budget: config.check_budget, config.size: size}, "the check")
            for size in config.check_sizes
        ]
        for point in candidates:  # a derived option may change the stages up to the shards
            for _ in self.share(point):
                pass
        sizes = [
            size
            for point in candidates
            for size in self.executor.read(_read_vocab_size, self.shared(point).shards_index)
        ]
        if any(isinstance(size, Ref) for size in sizes):  # a plan: some text is not encoded yet
            return
        # The largest size needs the fewest tokens; if it needs too many, check_epochs says so.
        limit, best_size = self.config.max_epochs or math.inf, content["prediction"]["parameters"]
        sized = list(zip(candidates, sizes, strict=True))
        allowed = [(point, size) for point, size in sized if self.epochs(point) <= limit]
        point, _ = min(allowed or sized[-1:], key=lambda chosen: _distance(chosen[0], chosen[1], best_size))
        self._log("Prediction for %.3g FLOPs: %.4f.", config.check_budget, content["prediction"]["loss"])
        self.check_epochs([point])
        self.check = [self._train_one(point, "Check")]
        self.points.append(point)
        if refusal := self._read_refusal(point, self.check[0]):
            raise UserError(refusal)

    def check_trained(self) -> None:
        """Raise UserError if no point can be trained."""
        refusals = [self._read_refusal(point, ref) for point, ref in zip(self.points, self.trials, strict=False)]
        if refusals and all(refusals):
            raise UserError(refusals[0])


def _shared_key(config: PipelineConfig) -> str:
    """Return what decides the stages up to the shards."""
    return json.dumps([asdict(part) for part in (config.data, config.chunk, config.tokenizer)], sort_keys=True)


def _trial_config(point: Point, limits: dict[str, float] | None = None) -> TrialConfig:
    config = pipeline_config(point)
    # At its last step, a training has nothing left to save.
    limits = {step: limit for step, limit in (limits or {}).items() if int(step) < config.train.steps}
    return TrialConfig(config.model, config.train, limits, point.title)


def _distance(point: Point, vocab_size: int, parameters: float) -> float:
    """Return how far the size of a point is from ``parameters``, as the logarithm of their ratio."""
    from lm.model.flops import parameter_count

    model = pipeline_config(point).model
    return abs(math.log(parameter_count(replace(model, vocab_size=vocab_size))["total"] / parameters))


def _count_train_tokens(store: Store, index: Ref) -> list[int]:
    return [read_output(store, index).json("index.json")["train"]["tokens"]]


def _read_vocab_size(store: Store, index: Ref) -> list[int]:
    return [read_output(store, index).json("index.json")["vocab_size"]]


def _read_results(store: Store, trials: list[Ref]) -> list[TrialResult]:
    return [from_json(read_output(store, ref).json("trial.json")) for ref in trials]


def _read_law(store: Store, law: Ref) -> list[dict[str, Any]]:
    return [read_output(store, law).json("law.json")]


def _read_best(store: Store, output: Ref, trials: list[Ref]) -> list[tuple[int, Ref]]:
    """Return the index of the best point and its model; nothing if no point finished."""
    figures = read_output(store, output).manifest["figures"]
    if "best_point" not in figures:
        return []
    index = figures["best_point"] - 1
    return [(index, model) for model in trained_models(store, trials[index : index + 1])]


def _report(config: SweepConfig, points: Sequence[Point]) -> SweepReport:
    # Validated, so that best.yaml has 300 where the sweep has 3e2.
    all_fields = [asdict(pipeline_config(point)) for point in points]
    configs = [{name: fields[name] for name in fields if name not in ("name", "execution")} for fields in all_fields]
    axes = [name for axis in config.axes for name in axis.names]
    return SweepReport(config.name, config.description, axes, [point.settings for point in points], configs)


def _stages(config: SweepConfig, inputs: dict[str, Any], executor: Executor) -> Iterator[tuple[str, Ref]]:
    state = _Sweep(config, inputs, executor)
    if config.search:
        search = Search(config.search, config.axes)
        yield from state.share(config.point(corners(config.axes)[0], "the base"))
        state.search(search)
    else:
        points = config.points()
        for point in points:
            yield from state.share(point)
        state.train(points)
    for ref in state.trials[-1:]:
        yield "trial", ref
    failure: UserError | None = None
    try:
        state.check_trained()
        state.check_law()
    except UserError as error:  # raised after the table, which shows what to add
        failure = error
    for ref in state.law:
        yield "scaling_law", ref
    trials = [*state.trials, *state.check]
    models = list(executor.read(trained_models, trials))
    output = executor.call(sweep, state.trials, models, state.law, state.check, _report(config, state.points))
    for best in executor.read(_read_best, output, trials):
        if not isinstance(best, Ref):  # a plan: the sweep is not made yet
            index, model = best
            yield from state.shared_stages(state.points[index])
            yield "train", model
    yield "sweep", output
    if failure:
        raise failure


def _check_stage(config: SweepConfig, name: str | None) -> None:
    if name == scaling_law.name and not config.law:
        raise UserError(f"There is no stage {name}: the sweep {config.name} has no law.")


SWEEP = Chain(_find_inputs, _stages, get_args(SweepStage), _check_stage)
