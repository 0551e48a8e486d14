"""The stages of the flow ``sweep`` in their order: trainings that differ in some options, compared; and the flow.

The stages up to the shards are those of the pipeline, and shared by all points that agree on them. Each point is then a
trial, which trains a model by the pipeline's stage ``train``.
"""

import functools
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any, get_args

from flows.config import PipelineConfig, StageName, complete
from flows.pipeline import PipelineInputs, TrainingInputs, find_inputs, prepare_training
from flows.plan import Executor
from flows.sweep_config import SweepConfig, SweepStage, load_sweep, pipeline_config, with_trials
from lm.common.errors import MachineError, UserError
from lm.experiments.axes import Point, Settings, corners
from lm.experiments.config import MixtureConfig
from lm.experiments.record import RecordedText
from lm.experiments.report import SweepReport
from lm.experiments.search import Search
from lm.experiments.trial import TrialConfig, TrialResult, from_json
from tasks.gate import find_look, gate
from tasks.mixture_law import mixture_law
from tasks.runtime.output import Ref, read_output
from tasks.runtime.store import Store
from tasks.scaling_law import scaling_law
from tasks.sweep import sweep as sweep_stage
from tasks.trial import trained_models, trial


def sweep_stages(config: SweepConfig, executor: Executor) -> None:
    """Run all stages: those of the pipeline up to the shards, the trials, what is fitted to them, and the table."""
    state = _Sweep(config, executor.find_inputs(_find_inputs), executor)
    failure: UserError | None = None
    if config.search:
        state.search(Search(config.search, config.axes))
    else:
        state.trials = state.train(config.points())
    try:
        state.check_trained()
        state.check_law()
        state.find_mixture()
        state.judge_variant()
        state.look_up_record()
    except UserError as error:  # raised after the table, which shows what to add
        failure = error
    trials = [*state.trials, *state.check]
    models = executor.read(trained_models, trials)
    report = make_report(config, state.points)
    output = executor.call(sweep_stage, state.trials, models, state.law, state.check, report, *state.found)
    for index, model in executor.read(_read_best, output, trials):
        for ref in (*state.prepare(state.points[index])[1], model):
            executor.finish(ref)
    executor.finish(output)
    if failure:
        raise failure


def _find_inputs(config: SweepConfig, store: Store) -> dict[str, PipelineInputs]:
    """Return the sources of each text that points read."""
    bases = [config.base] if config.search else [pipeline_config(point) for point in config.points()]
    by_text = {_text_key(base): base for base in bases}
    return {key: find_inputs(base, store) for key, base in by_text.items()}


def _text_key(config: PipelineConfig) -> str:
    """Return what decides the text. Of the sources of a mixture, weights do not."""
    sections = [asdict(section) for section in (config.data, config.filter, config.deduplicate, config.decontaminate)]
    sections[0]["mix"] = {name: source["paths"] for name, source in sections[0]["mix"].items()}
    return json.dumps(sections, sort_keys=True)


class _Sweep:
    """One run of the stages: the points so far, and their trials."""

    def __init__(self, config: SweepConfig, inputs: dict[str, PipelineInputs], executor: Executor) -> None:
        self.config, self.inputs, self.executor = config, inputs, executor
        self.points: list[Point] = []
        self.trials: list[Ref] = []
        self.law: list[Ref] = []
        self.check: list[Ref] = []
        self.found: list[Any] = []
        """The law of a mixture, the verdict of a gate, or a record, as arguments of the stage ``sweep``; empty without
        them."""
        self._prepared: dict[str, tuple[TrainingInputs, list[Ref]]] = {}

    def prepare(self, point: Point) -> tuple[TrainingInputs, list[Ref]]:
        """Run the stages up to the shards for a point, unless an earlier point has the same. Return what a training
        reads, and the outputs of these stages."""
        config = pipeline_config(point)
        key = _inputs_key(config)
        if key not in self._prepared:
            training = prepare_training(config, self.inputs[_text_key(config)], self.executor)
            outputs = [ref for name, ref in self.executor.finished.items() if name in get_args(StageName)]
            self._prepared[key] = training, outputs
        return self._prepared[key]

    def train(self, points: Sequence[Point]) -> list[Ref]:
        """Run the trials of points: one after the other, or as many at once as the machine or the cluster may."""
        for point in points:
            self.prepare(point)
        self.check_epochs(points)
        execution = self.config.execution
        trials: dict[int, Ref] = {}
        if execution.runner == "threads" and execution.max_trainings == 1:
            for index, point in enumerate(points):
                trials[index] = self._train_one(point, f"Point {index + 1} of {len(points)}")
        else:
            groups: dict[str, list[int]] = {}
            for index, point in enumerate(points):
                groups.setdefault(_inputs_key(pipeline_config(point)), []).append(index)
            for indices in groups.values():
                configs = [_trial_config(points[index]) for index in indices]
                refs = self.executor.map(trial, "trial", configs, *self.prepare(points[indices[0]])[0][:4])
                trials |= dict(zip(indices, refs, strict=True))
        self.points += points
        refs = [trials[index] for index in range(len(points))]
        self.executor.finish(refs[-1])
        for point, result in zip(points, map(self._read_result, refs), strict=True):
            if refusal := _describe_refusal(point, result):
                self.executor.log("%s", refusal)
        return refs

    def search(self, search: Search) -> None:
        """Run the trials of a search, each after the results of the earlier ones."""
        self.prepare(self.config.point(corners(self.config.axes)[0], "the base"))
        for number in range(1, search.config.trials + 1):
            try:  # only the corners of the axes are checked before anything runs
                point = self.config.point(search.ask(), f"trial {number}")
                self.prepare(point)
                self.check_epochs([point])
                ref = self._train_one(point, f"Trial {number} of {search.config.trials}", search.limits())
                result = self._read_result(ref)
                if refusal := _describe_refusal(point, result):
                    raise UserError(refusal)
            except MachineError:
                raise
            except UserError as error:
                if number == search.config.trials and not self.trials:
                    raise
                self.executor.log("Trial %d is left out. %s", number, error)
                search.leave_out()
                continue
            self.points.append(point)
            self.trials.append(ref)
            search.tell(result)
        self.executor.finish(self.trials[-1])

    def _train_one(self, point: Point, title: str, limits: dict[str, float] | None = None) -> Ref:
        self.executor.log("%s: %s.", title, point.title)
        name, arguments = f"trial {point.title}", self.prepare(point)[0][:4]
        if self.config.execution.runner == "threads":
            return self.executor.call(trial, _trial_config(point, limits), *arguments, title=name)
        return self.executor.map(trial, name, [_trial_config(point, limits)], *arguments)[0]  # in a worker

    def check_epochs(self, points: Sequence[Point]) -> None:
        """Raise UserError for the first point that reads the training text more than ``max_epochs`` times."""
        limit = self.config.max_epochs
        for point in points if limit else ():
            if (epochs := self._epochs(point)) > (limit or math.inf):
                raise UserError(
                    f"The point with {point.title} reads the training text {epochs:.2f} times, and max_epochs is "
                    f"{limit:g}. Add text, or lower the steps."
                )

    def _epochs(self, point: Point) -> float:
        """Return how many times a point reads the training text."""
        config = pipeline_config(point)
        tokens_seen = config.train.steps * config.train.batch_size * config.model.context_length
        return float(tokens_seen / self._read_index(point)["train"]["tokens"])

    def check_trained(self) -> None:
        """Raise UserError if no point can be trained."""
        results = map(self._read_result, self.trials)
        refusals = [_describe_refusal(*trained) for trained in zip(self.points, results, strict=True)]
        if refusals and all(refusals):
            raise UserError(refusals[0])

    def check_law(self) -> None:
        """Fit the scaling law, and train the check of its prediction. Raises UserError if one is not possible."""
        config = self.config.law
        if config is None:
            return
        settings = [point.settings for point in self.points]
        self.law = [self.executor.finish(self.executor.call(scaling_law, self.trials, settings, config))]
        content = self.executor.read(_read_json, self.law[0], "law.json")
        if not config.check_budget:
            return
        best = settings[content["best_of_largest_budget"]]
        axes = {name: best[name] for name in self.config.varied if name in best}
        candidates = [
            self.config.point(axes | {config.budget: config.check_budget, config.size: size}, "the check")
            for size in config.check_sizes
        ]
        # The largest size needs the fewest tokens; if it needs too many, check_epochs says so.
        limit, prediction = self.config.max_epochs or math.inf, content["prediction"]
        allowed = [point for point in candidates if self._epochs(point) <= limit] or candidates[-1:]
        point = min(allowed, key=lambda point: self._distance(point, prediction["parameters"]))
        self.executor.log("Prediction for %.3g FLOPs: %.4f.", config.check_budget, prediction["loss"])
        self.check_epochs([point])
        self.check = [self._train_one(point, "Check")]
        self.points.append(point)
        if refusal := _describe_refusal(point, self._read_result(self.check[0])):
            raise UserError(refusal)

    def find_mixture(self) -> None:
        """Fit the law of a mixture, find the best weights, and train on them: to fit the law again, and to check it.

        Raises UserError if too few points are trained.
        """
        mixture, base = self.config.mixture, self.config.base
        if mixture is None:
            return
        step_tokens = base.train.batch_size * base.model.context_length
        steps = round(mixture.target_tokens / step_tokens) or base.train.steps
        tokens = float(mixture.target_tokens or steps * step_tokens)
        law = self._fit_mixture_law(mixture, tokens)
        for number in range(1, mixture.refine_rounds + 1):
            found, title = law["mixtures"]["found"], f"the weights found in round {number}"
            lengths = [max(1, round(length * base.train.steps)) for length in mixture.lengths]
            unlimited = self.config.without_epoch_limits
            points = [
                self.config.point(self._mix_settings(law, found, length) | unlimited, title) for length in lengths
            ]
            self.trials += self.train(points)
            law = self._fit_mixture_law(mixture, tokens)
        points = []
        for seed, (name, part) in itertools.product(range(mixture.check_seeds), law["mixtures"].items()):
            settings = self._mix_settings(law, None if name == "natural" else part, steps)
            seeded = settings | {"train.seed": base.train.seed + seed}
            points.append(self.config.point(seeded, f"check with {name} weights"))
        if points:
            self.check = self.train(points)

    def _mix_settings(self, law: dict[str, Any], mix: dict[str, Any] | None, steps: int) -> Settings:
        """Return the settings of a training on the weights of a mixture of the law. None: in natural proportions."""
        weight = dict(zip(law["sources"], mix["weights"], strict=True)) if mix else {}
        names = self.config.base.data.named_sources
        return self.config.mix_settings([round(weight[name], 4) if mix else None for name in names], steps)

    def _fit_mixture_law(self, mixture: MixtureConfig, tokens: float) -> dict[str, Any]:
        """Fit the law to all trials so far. Return ``mixture.json``."""
        index = self.prepare(self.points[0])[0].shards_index
        mixes = [pipeline_config(point).data.mix_weights for point in self.points]
        limits = {name: weights["max_epochs"] for name, weights in self.config.base.data.mix_weights.items()}
        law = self.executor.finish(self.executor.call(mixture_law, self.trials, index, mixes, limits, tokens, mixture))
        self.found = [[law]]
        return self.executor.read(_read_json, law, "mixture.json")

    def judge_variant(self) -> None:
        """Judge the variant of a gate. Raises UserError if its trainings do not compare."""
        if (config := self.config.gate) is None:
            return
        index = self.prepare(self.points[0])[0].shards_index
        arms = [_trial_config(point) for point in self.points[:4]]  # both at both sizes
        look = self.executor.read(find_look, index, arms, self.trials)
        models = self.executor.read(trained_models, self.trials)
        self.found = [[], [self.executor.finish(self.executor.call(gate, self.trials, models, config, look))]]

    def look_up_record(self) -> None:
        """Find the record with which the stage ``sweep`` compares the trainings."""
        if config := self.config.record:
            index = self.prepare(self.points[0])[0].shards_index
            self.found = [[], [], RecordedText(config, self.executor.read(_read_digest, index))]

    def _distance(self, point: Point, parameters: float) -> float:
        """Return how far the size of a point is from ``parameters``, as the logarithm of their ratio."""
        from lm.model.flops import parameter_count

        model = replace(pipeline_config(point).model, vocab_size=self._read_index(point)["vocab_size"])
        return abs(math.log(parameter_count(model)["total"] / parameters))

    def _read_index(self, point: Point) -> dict[str, Any]:
        """Return the index of a point's shards. A derived option may change the stages up to them."""
        return self.executor.read(_read_json, self.prepare(point)[0].shards_index, "index.json")

    def _read_result(self, ref: Ref) -> TrialResult:
        return from_json(self.executor.read(_read_json, ref, "trial.json"))


def _inputs_key(config: PipelineConfig) -> str:
    """Return what decides the stages up to the shards."""
    sections = asdict(config.chunk), asdict(config.tokenizer)
    return json.dumps([_text_key(config), *sections], sort_keys=True)


def _trial_config(point: Point, limits: dict[str, float] | None = None) -> TrialConfig:
    config = pipeline_config(point)
    # At its last step, a training has nothing left to save.
    limits = {step: limit for step, limit in (limits or {}).items() if int(step) < config.train.steps}
    return TrialConfig(config.model, config.train, limits, point.title, config.data.mix_weights)


def _describe_refusal(point: Point, result: TrialResult) -> str:
    """Return why a point cannot be trained; empty if it can."""
    is_refused = result.state == "refused"
    return f"The point with {point.title} cannot be trained. {result.reason}" if is_refused else ""


def _read_json(store: Store, output: Ref, name: str) -> dict[str, Any]:
    content: dict[str, Any] = read_output(store, output).json(name)
    return content


def _read_digest(store: Store, output: Ref) -> str:
    return read_output(store, output).digest


def _read_best(store: Store, output: Ref, trials: list[Ref]) -> list[tuple[int, Ref]]:
    """Return the index of the best point and its model; nothing if no point finished."""
    figures = read_output(store, output).manifest["figures"]
    if "best_point" not in figures:
        return []
    index = figures["best_point"] - 1
    return [(index, model) for model in trained_models(store, trials[index : index + 1])]


def make_report(config: SweepConfig, points: Sequence[Point]) -> SweepReport:
    """Return the names and settings of a sweep's points, for its table and page."""
    # Validated, so that best.yaml has 300 where the sweep has 3e2.
    all_fields = [asdict(pipeline_config(point)) for point in points]
    configs = [{name: fields[name] for name in fields if name not in ("name", "execution")} for fields in all_fields]
    for config_fields in configs:
        if not config_fields["data"]["mix"]:  # the keys of sweeps from before there were mixtures lack it
            del config_fields["data"]["mix"]
    return SweepReport(config.name, config.description, config.varied, [point.settings for point in points], configs)


sweep: Any  # the flow, see __getattr__


@functools.cache
def __getattr__(name: str) -> Any:
    """Make the flow at its first use: the command line imports this module too, and Prefect takes seconds."""
    if name != "sweep":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from prefect import flow
    from pydantic import BeforeValidator

    from flows.executor import FLOW_OPTIONS, check_device, run_stages

    demo = load_sweep("learning-rate", "demo")
    validator = BeforeValidator(functools.partial(complete, default=demo))

    @flow(name="sweep", **FLOW_OPTIONS)
    def sweep(
        config: Annotated[SweepConfig, validator] = demo,
        root: str = "artifacts",
        refresh: tuple[SweepStage, ...] = (),
    ) -> dict[str, Any]:
        """Train a model at each point of a sweep, and compare them. Finished points are taken from the cache.

        Args:
            config: The sweep: the base configuration, and what varies.
            root: Directory or fsspec URL of all outputs.
            refresh: Stages to run again even if they are cached. A refresh of train includes the trials.
        """
        check_device(config.execution.device)
        return run_stages(sweep_stages, config, root, None, with_trials(refresh))

    return sweep
