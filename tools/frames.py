"""Print the frames of this project that lead from the command line to the optimizer's step.

``python -m tools.frames`` runs ``textmill run`` with one training step in a temporary root.
"""

import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from lm.optim.adamw import AdamW
from textmill.cli.main import main as textmill

_CHECKOUT = Path(__file__).parents[1]
_FLOORS = {"textmill", "flows", "tasks", "lm"}


def main() -> None:
    """Run the pipeline, and print each frame from the outermost to that of the optimizer, then their number."""
    step, stacks = AdamW.step, list[traceback.StackSummary]()

    def traced_step(optimizer: AdamW, *arguments: Any, **options: Any) -> float | None:
        stacks.append(traceback.extract_stack())
        return step(optimizer, *arguments, **options)

    AdamW.step = traced_step  # type: ignore[assignment, method-assign]
    with tempfile.TemporaryDirectory() as root:
        sys.argv = ["textmill", "run", "--root", root, "--until", "train", "--train.steps", "1"]
        sys.argv += ["--train.warmup_steps", "0"]
        textmill()
    frames = [frame for frame in stacks[0] if Path(frame.filename).is_relative_to(_CHECKOUT)]
    ours = [frame for frame in frames if Path(frame.filename).relative_to(_CHECKOUT).parts[0] in _FLOORS]
    for frame in ours:
        print(f"{Path(frame.filename).relative_to(_CHECKOUT)}:{frame.lineno} {frame.name}")
    print(f"{len(ours) + 1} frames with the optimizer's own")


if __name__ == "__main__":
    main()
