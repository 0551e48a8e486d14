"""The page of a profile: where the time and the memory of a training step go."""

from collections.abc import Iterator
from typing import Any

from tasks.pages.charts import draw_bars, embed_figure, new_figure
from tasks.pages.markdown import code, table

_COLOURS = {
    "data": "#8c8c8c",
    "forward": "#4c78a8",
    "backward": "#f58518",
    "communication": "#e45756",
    "optimizer": "#54a24b",
    "other": "#d0d0d0",
}
_SIZE = (11, 3.8)  # of a figure, in inches


def profile_page(profile: dict[str, Any]) -> Iterator[str]:
    """Show the content of ``profile.json``: time, memory and throughput, with two pictures."""
    step, traced = profile["seconds_per_step"], profile["traced_seconds_per_step"]
    yield f"{describe(profile)}."
    yield "## Time"
    yield _draw_time(profile)
    yield table(("phase", "milliseconds", "share of the step"), phase_rows(profile))
    yield (
        f"The mean of {profile['steps']:,} steps. A phase does not count the time of the phases inside it. "
        f"Communication is the time that nothing hides. Steps without the clock of the phases take "
        f"**{profile['plain_seconds_per_step'] * 1e3:,.1f} ms**."
    )
    yield "### Operations\n\n" + table(
        ("operation", "milliseconds", "share of the step", "calls"),
        [
            (code(row["name"]), row["seconds"] * 1e3, f"{100 * row['seconds'] / traced:.1f} %", f"{row['calls']:,.0f}")
            for row in profile["operations"]
        ],
    )
    yield (
        "Without the time of the operations that an operation calls. From steps under torch's profiler, which take "
        f"{traced / step:.2f} times as long; all their operations are in `trace.json.gz`, for https://ui.perfetto.dev."
    )
    yield "## Memory"
    yield _draw_memory(profile)
    yield table(("memory of a process, MB", "measured", "predicted"), memory_rows(profile))
    note = " The training is compiled, which the prediction does not know." if profile["is_compiled"] else ""
    yield (
        f"Activations are those at the end of the forward pass.{note} A micro-batch has {profile['micro_batch']:,} "
        f"sequences. By the formula, up to **{profile['largest_micro_batch']:,}** fit the "
        f"{profile['available_memory'] / 1e9:,.1f} GB that a process may use."
    )
    yield "## Compute\n\n" + table(("", ""), compute_rows(profile))


def describe(profile: dict[str, Any]) -> str:
    """Return in one line which training ran on which device."""
    count = profile["processes"]
    processes = f", {count} processes ({profile['parallel']})" if count > 1 else ""
    compiled = ", compiled" if profile["is_compiled"] else ""
    return (
        f"{profile['parameters']:,} parameters on {profile['device']}{processes}, {profile['precision']}{compiled}, "
        f"{profile['tokens_per_step']:,} tokens a step"
    )


def phase_rows(profile: dict[str, Any]) -> list[tuple[str, float, str]]:
    """Return name, milliseconds and share of each phase, of the rest, and of the step."""
    step = profile["seconds_per_step"]
    seconds = profile["phases"] | {"other": step - sum(profile["phases"].values()), "step": step}
    return [(name, value * 1e3, f"{100 * value / step:.1f} %") for name, value in seconds.items()]


def memory_rows(profile: dict[str, Any]) -> list[tuple[str, float, float]]:
    """Return name, measured and predicted megabytes of each kind of memory."""
    measured, predicted = profile["memory"]["measured"], profile["predicted_memory"]
    names = ("weights", "gradients", "optimizer_state", "activations", "peak")
    return [(name.replace("_", " "), measured[name] / 1e6, predicted[name] / 1e6) for name in names]


def compute_rows(profile: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the predicted FLOPs of a step, and the measured throughput and utilization."""
    seconds, flops, count = profile["plain_seconds_per_step"], profile["flops_per_step"], profile["processes"]
    peak = profile["peak_flops"]
    return [
        ("FLOPs of a step, predicted", f"{flops:.3g}"),
        ("FLOPs per second", f"{flops / seconds:.3g}{f' of {peak * count:.3g}' if peak else ''}"),
        ("MFU", f"{100 * profile['mfu']:.1f} %" if peak else "– (other programs held the cores)"),
        ("tokens per second", f"{profile['tokens_per_step'] / seconds:,.0f}"),
    ]


def _draw_time(profile: dict[str, Any]) -> str:
    figure, phases, operations = new_figure("Phases of a step", "milliseconds", size=_SIZE, widths=(1, 1.15))
    rows = phase_rows(profile)[:-1]
    colours = [_COLOURS.get(name, _COLOURS["other"]) for name, *_ in rows]
    draw_bars(phases, [name for name, *_ in rows], {"": [row[1] for row in rows]}, "{:,.1f}", colours, True)
    operators = [row["name"].removeprefix("aten::") for row in profile["operations"]]
    names = [name if len(name) <= 40 else f"{name[:20]}…{name[-20:]}" for name in operators]
    seconds = {"": [row["seconds"] * 1e3 for row in profile["operations"]]}
    draw_bars(operations, names, seconds, "{:,.1f}", ["#72b7b2"] * len(names), True)
    operations.set(title="Operations, own time", xlabel="milliseconds")
    return embed_figure(figure, "Time of a step by phase and operation")


def _draw_memory(profile: dict[str, Any]) -> str:
    figure, curve, kinds = new_figure("Memory over a step", "milliseconds", "MB", size=_SIZE, widths=(1.6, 1))
    times, sizes = zip(*profile["memory"]["curve"], strict=True)
    milliseconds = [1e3 * time for time in times]
    curve.step(milliseconds, [size / 1e6 for size in sizes], where="post", color="#333333", linewidth=1)
    for name, start, stop in profile["memory"]["phases"]:
        if stop - start > 0.001 * times[-1]:  # shorter ones are not visible
            curve.axvspan(1e3 * start, 1e3 * stop, color=_COLOURS[name], alpha=0.25, linewidth=0, label=name)
    curve.axhline(profile["predicted_memory"]["peak"] / 1e6, color="#b22222", linestyle="--", label="predicted peak")
    handles, labels = curve.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.22)}
    curve.legend(unique.values(), unique, fontsize=7, ncols=len(unique), **place)
    curve.set(xlim=(0, milliseconds[-1]), ylim=(0, None))
    curve.spines[["top", "right"]].set_visible(False)
    names, measured, predicted = zip(*memory_rows(profile), strict=True)
    series = {"measured": measured, "predicted": predicted}
    draw_bars(kinds, [name.replace(" ", "\n") for name in names], series, colours=("#4c78a8", "#bab0ac"))
    kinds.set(title="Measured and predicted", ylabel="MB")
    return embed_figure(figure, "Memory of a step, measured and predicted")
