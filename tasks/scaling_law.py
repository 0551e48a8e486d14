"""Stage ``scaling_law``: fit a scaling law to the trials of a sweep, and predict the loss of a larger budget.

The prediction is on disk before the training that checks it starts.
"""

import logging
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lm.common.errors import UserError
from lm.experiments.config import LawConfig
from lm.experiments.trial import from_json
from tasks.runtime.output import Output
from tasks.runtime.run_context import Attempt
from tasks.runtime.stage import stage

if TYPE_CHECKING:
    from lm.experiments.scaling_law import Measurement

log = logging.getLogger(__name__)


@stage("scaling_law")
def scaling_law(out: Attempt, trials: list[Output], settings: list[dict[str, Any]], config: LawConfig) -> None:
    """Write ``law.json``: the measurements, the fitted law, the prediction, and the point of the largest budget that
    has the lowest loss. From four budgets on, also the loss over parameters and tokens, if it can be fitted."""
    from lm.experiments.scaling_law import MIN_BUDGETS_FOR_IRREDUCIBLE_LOSS, fit_scaling_law, measurements, predict

    results = [from_json(output.json("trial.json")) for output in trials]
    found = measurements(settings, results, config.budget, config.size)
    runs = [run for run, _ in found]
    law = fit_scaling_law(runs)
    prediction = predict(runs, law, config.check_budget) if config.check_budget else None
    largest = max(run.budget for run in runs)
    _, best = min((run.loss, index) for run, index in found if run.budget == largest)
    has_surface = len(law.parabolas) >= MIN_BUDGETS_FOR_IRREDUCIBLE_LOSS
    content = {
        "measurements": [asdict(run) for run in runs],
        "law": asdict(law),
        "prediction": asdict(prediction) if prediction else None,
        "surface": _fit_surface(runs, config.check_budget) if has_surface else None,
        "best_of_largest_budget": best,
    }
    out.write_json("law.json", content, indent=1)
    out.figures = {name: asdict(getattr(law, name)) for name in ("parameters", "tokens", "loss")}
    out.figures |= {"irreducible_loss": law.irreducible_loss} if law.irreducible_loss else {}
    out.figures |= {"prediction": content["prediction"]}


def _fit_surface(runs: "list[Measurement]", budget: float | None) -> dict[str, Any] | None:
    from lm.experiments.loss_surface import fit_loss_surface, predict_by_surface

    try:
        surface = fit_loss_surface(runs)
        prediction = asdict(predict_by_surface(runs, surface, budget)) if budget else None
    except UserError as error:
        log.warning("%s", error)
        return None
    return {"fit": asdict(surface), "prediction": prediction}
