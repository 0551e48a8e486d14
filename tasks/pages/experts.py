"""The load of the experts of a training, as a table and a heat map."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from tasks.pages.markdown import table
from tasks.pages.plots import embed_figure

_MAX_COLUMNS = 400
_MAX_LOAD_DRAWN = 2.0  # times the mean; the scale is symmetrical around 1


def expert_loads(rows: list[dict[str, Any]], num_dense_layers: int) -> Iterator[str]:
    """Show the load of each expert over the logged steps, and the figures of the last one, from ``metrics.jsonl``.

    The first ``num_dense_layers`` blocks have no experts, and no row in the picture.
    """
    logged = [row for row in rows if row.get("expert_loads")]
    if not logged:
        return
    last = logged[-1]
    figures = [
        ("highest load, times the mean", f"{last['expert_load_max']:.2f}"),
        ("entropy of the loads, at most 1", f"{last['expert_load_entropy']:.3f}"),
        ("experts without a token", last["dead_experts"]),
        ("auxiliary loss, 1 if balanced", f"{last['aux_loss']:.3f}"),
        ("router z-loss", f"{last['z_loss']:.3f}"),
    ]
    if "dropped_choices" in last:
        figures.append(("choices dropped by the capacity", f"{100 * last['dropped_choices']:.1f} %"))
    yield "### Experts\n\n" + table((f"step {last['step']:,}", ""), figures)
    yield _draw_loads(logged[:: len(logged) // _MAX_COLUMNS + 1], num_dense_layers + 1)


def _draw_loads(rows: list[dict[str, Any]], first_block: int) -> str:
    from matplotlib.figure import Figure  # slow to import

    loads = np.array([row["expert_loads"] for row in rows])  # (steps, blocks, experts)
    steps, blocks, experts = loads.shape
    figure = Figure(figsize=(8, 1.2 + min(8.0, 0.16 * blocks * experts)), layout="constrained")
    axes = figure.add_subplot(title="Load of each expert by step", xlabel="step", ylabel="expert, by block")
    picture = loads.reshape(steps, blocks * experts).T
    edges = [0, *(row["step"] for row in rows)]  # a column ends at its step
    mesh = axes.pcolormesh(edges, np.arange(blocks * experts + 1), picture, cmap="RdBu_r", vmin=0, vmax=_MAX_LOAD_DRAWN)
    axes.hlines(np.arange(1, blocks) * experts, 0, edges[-1], colors="black", linewidth=0.8)
    names = [f"block {first_block + index}" for index in range(blocks)]
    axes.set_yticks(np.arange(blocks) * experts + experts / 2, names)
    axes.invert_yaxis()
    figure.colorbar(mesh, label="load over the mean", extend="max")
    return embed_figure(figure, "Load of each expert by step")
