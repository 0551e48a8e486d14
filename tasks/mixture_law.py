"""Stage ``mixture_law``: fit the law of a mixture to the trials of a sweep, and find the best weights."""

from dataclasses import asdict
from typing import Any

from lm.experiments.config import MixtureConfig
from lm.experiments.trial import from_json
from tasks.runtime.output import Output
from tasks.runtime.run_context import Attempt
from tasks.runtime.stage import stage

Weights = dict[str, dict[str, float | None]]  # of data.mix, by source


@stage("mixture_law")
def mixture_law(
    out: Attempt,
    trials: list[Output],
    index: Output,
    mixes: list[Weights],
    limits: dict[str, float | None],
    tokens: float,
    config: MixtureConfig,
) -> None:
    """Write ``mixture.json``: the weights and losses of each finished trial, the law, and the best weights.

    ``mixes`` has the weights of each trial. The weights are for a training of ``tokens`` tokens. ``limits`` are the
    epochs that a source may have there.
    """
    import numpy as np

    from lm.curate.mixture_law import find_best_weights, fit_mixture_law, leave_one_out
    from lm.data.mixed_batches import normalize_weights, read_sources

    content, names = index.json("index.json"), sorted(limits)
    results = [from_json(output.json("trial.json")) for output in trials]
    finished = [number for number, result in enumerate(results) if len(result.source_bits_per_byte) == len(names)]
    sources = read_sources(content, mixes[0])
    weights = [[float(weight) for weight in normalize_weights(read_sources(content, mix))] for mix in mixes]
    weights_RK = np.array([weights[number] for number in finished]).reshape(len(finished), len(names))
    losses_RL = np.array([[results[number].source_bits_per_byte[name] for name in names] for number in finished])
    target = np.array([config.target.get(name, 0.0) if config.target else 1.0 for name in names])
    target /= target.sum()
    tokens_R = np.array([results[number].tokens for number in finished], float)
    lengths_R = tokens_R / tokens_R.max(initial=1)
    law = fit_mixture_law(weights_RK, losses_RL, lengths_R).at(tokens / tokens_R.max(initial=1))
    left_out_RL = leave_one_out(weights_RK, losses_RL, lengths_R)
    high = np.array(
        [
            1.0 if (epochs := limits[source.name]) is None else min(1.0, epochs * source.train_tokens / tokens)
            for source in sources
        ]
    )
    best = find_best_weights(law, target.tolist(), np.full(len(names), config.min_weight), high)
    measured, predicted = losses_RL @ target, left_out_RL @ target
    natural = np.array([source.train_tokens for source in sources], float)
    shown = {"found": best, "natural": natural / natural.sum(), "uniform": np.full(len(names), 1 / len(names))}
    out.write_json(
        "mixture.json",
        {
            "sources": names,
            "tokens": [source.train_tokens for source in sources],
            "max_epochs": [limits[name] for name in names],
            "highest_weights": high.tolist(),
            "target": target.tolist(),
            "runs": [
                {
                    "point": number + 1,
                    "length": float(lengths_R[row]),
                    "weights": weights[number],
                    "losses": losses_RL[row].tolist(),
                    "left_out": left_out_RL[row].tolist(),
                    "target": float(measured[row]),
                    "left_out_target": float(predicted[row]),
                }
                for row, number in enumerate(finished)
            ],
            "target_tokens": tokens,
            "law": asdict(law),
            "left_out_error": float(np.mean(np.abs(predicted / measured - 1))),
            "mixtures": {
                name: {
                    "weights": part.tolist(),
                    "losses": law.predict(part).tolist(),
                    "target": _mean(law, part, target),
                }
                for name, part in shown.items()
            },
        },
        indent=1,
    )
    found = {name: round(float(weight), 4) for name, weight in zip(names, best, strict=True)}
    out.figures = {"weights": found, "prediction": _mean(law, best, target), "runs": len(finished)}


def _mean(law: Any, weights: Any, target: Any) -> float:
    return float(law.predict(weights) @ target)
