"""Pages of the stages of post-training: curves, and answers of the models side by side."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.pages.charts import draw_lines, embed_figure, new_figure
from tasks.pages.markdown import code, table

if TYPE_CHECKING:
    from tasks.runtime.output import Output
    from tasks.runtime.run_context import Attempt

_MAX_CHARACTERS = 400
_CURVES = {
    "loss": (("loss", "training"), ("valid_loss", "held out")),
    "divergence from the teacher, nats per token": (
        ("divergence", "samples"),
        ("valid_divergence", "held out, greedy"),
    ),
    "share of pairs in the right order": (("accuracy", "training"), ("valid_accuracy", "held out")),
    "margin between the rewards of a pair": (("margin", "training"), ("valid_margin", "held out")),
    "learned reward": (("learned_reward", "samples"), ("valid_learned_reward", "held out, greedy")),
    "reward": (("reward", "samples"), ("valid_reward", "held out, greedy")),
    "tokens of a response": (("response_tokens", "samples"), ("valid_tokens", "held out, greedy")),
    "entropy, nats per token": (("entropy", "samples"),),
    "KL divergence from the start, nats per token": (("kl", "samples"),),
    "share of groups without signal": (("groups_without_signal", "samples"),),
    "loss of the values": (("value_loss", "samples"),),
    "share of clipped tokens": (("clip_fraction", "samples"),),
}
"""Curves by title: names of metrics with their labels."""


def dialogs(out: "Attempt", **inputs: Any) -> Iterator[str]:
    """Show the number of examples, the damaged rows, and the first examples."""
    counts = [(kind, out.figures[kind]) for kind in ("dialogs", "pairs", "problems")]
    cells = [(kind, count["train"], count["valid"], count.get("test", "")) for kind, count in counts]
    yield table(("examples", "training", "held out", "test"), cells)
    content = out.read_json("examples.json")
    if content["reward"]:
        yield f"Reward of the problems: {code(content['reward'])}."
    if content["damaged"]:
        shown = [(code(name),) for name in content["damaged"][:20]]
        yield f"**{out.figures['damaged']:,} damaged rows were skipped.** The first:\n\n" + table(("row",), shown)
    if out.figures["left_out"]:
        yield f"{out.figures['left_out']:,} examples for training were left out: held-out ones ask the same."
    rows = []
    with (out.directory / "dialogs-train.jsonl").open(encoding="utf-8") as file:
        for line, _ in zip(file, range(5), strict=False):
            rows.append([_quote(message["content"]) for message in json.loads(line)["messages"][-2:]])
    if rows:
        yield "### First dialogs\n\n" + table(("last message of the user", "answer"), rows)


def training(out: "Attempt", **inputs: Any) -> Iterator[str]:
    """Show the curves of the metrics, and the answers to the sample prompts over time."""
    from lm.train.tracking import read_metrics

    yield unfinished(out.directory)
    figures = {name: value for name, value in out.figures.items() if name not in ("best", "last") and value is not None}
    yield table(("at the end", ""), [(name.replace("_", " "), value) for name, value in figures.items()])
    yield f"Best checkpoint: {code(out.figures['best'])}; the last: {code(out.figures['last'])}."
    samples = read_metrics(out.directory / "samples.jsonl")
    rows = [(sample["step"], _quote(sample["prompt"]), _quote(sample["text"])) for sample in samples]
    if rows:
        yield "### Answers over time\n\n" + table(("step", "prompt", "answer"), rows[:: len(rows) // 20 + 1])


def unfinished(directory: Path) -> str:
    """Return a plot for each group of metrics of a training that may still run; empty before its first metrics."""
    from lm.train.tracking import read_metrics

    rows, plots = read_metrics(directory / "metrics.jsonl"), []
    for title, metrics in _CURVES.items():
        lines = {
            label: [(row["step"], row[name]) for row in rows if row.get(name) is not None] for name, label in metrics
        }
        if any(lines.values()):
            figure, axes = new_figure(title, "step")
            draw_lines(axes, lines)
            plots.append(embed_figure(figure, title))
    return "\n\n".join(plots)


def evaluate(out: "Attempt", models: "list[Output]", **inputs: Any) -> Iterator[str]:
    """Show the figures of each model, the categories of its responses, and the same prompts side by side."""
    figures = out.figures
    if "accuracy" in (first := next(iter(figures.values()))):
        rows = [
            (
                name,
                percent_with_interval(part),
                *(f"{count:,} ({count / part['problems']:.0%})" for count in part["categories"].values()),
            )
            for name, part in figures.items()
        ]
        yield table(("held out", "accuracy, 95 % interval", *first["categories"]), rows)
    rewards = "reward", "format_reward", "answer_reward"
    names = ("answer_loss", *rewards, "response_tokens", "cut_responses", "failed_rewards")
    fields = [name for name in names if any(part.get(name) is not None for part in figures.values())]
    rows = [(field.replace("_", " "), *(part[field] for part in figures.values())) for field in fields]
    yield table(("held out", *figures), rows)
    content = out.read_json("answers.json")
    answers = [
        [
            *((prompt, _quote(response)) for prompt, response in part["samples"]),
            *(
                (
                    row["prompt"][-1]["content"],
                    f"{_quote(row['response'])} ({row['category']}, reward {row['rewards']['reward']:g})",
                )
                for row in part["responses"]
            ),
        ]
        for part in content.values()
    ]
    rows = [(_quote(group[0][0]), *(text for _, text in group)) for group in list(zip(*answers, strict=True))[:12]]
    if rows:
        yield "### The same prompts\n\n" + table(("prompt", *content), rows)


def percent_with_interval(figures: dict[str, Any]) -> str:
    """Return the accuracy of a summary with its confidence interval, in percent."""
    accuracy, low, high = (100 * figures[name] for name in ("accuracy", "accuracy_low", "accuracy_high"))
    return f"{accuracy:.1f} % [{low:.1f}, {high:.1f}]"


def _quote(text: str) -> str:
    return code(text if len(text) <= _MAX_CHARACTERS else text[:_MAX_CHARACTERS] + "…")
