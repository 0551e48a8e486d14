"""``python -m tests.helpers.slow_training JOB`` trains as ``lm.train``, but each step takes some ms longer."""

import os
import sys
import time
from typing import Any

from lm.train.__main__ import main
from lm.train.trainer import Trainer

SECONDS_VARIABLE = "TEXTMILL_STEP_SECONDS"  # environment variable: how much longer

if __name__ == "__main__":
    train_step, seconds = Trainer.train_step, float(os.environ.get(SECONDS_VARIABLE, "0.01"))

    def train_slowly(trainer: Trainer, *arguments: Any) -> Any:
        time.sleep(seconds)
        return train_step(trainer, *arguments)

    Trainer.train_step = train_slowly  # type: ignore[method-assign, assignment]
    code = main()
    assert "torch._dynamo" not in sys.modules  # its import takes two seconds
    sys.exit(code)
