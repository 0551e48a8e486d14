"""Evaluation of a model on held-out data."""

from lm.data.dialogs import Dialog
from lm.posttrain.comparison import compare_model
from lm.posttrain.config import ComparisonConfig
from tests.helpers.posttraining import CHAT, chat_policy, dialog


def test_dialogs_that_do_not_fit_have_no_loss() -> None:
    """The training leaves them out, so the evaluation after it must not fail on them."""
    too_long, short = dialog("x" * 1000, "yes"), dialog("x", "yes")

    def loss(*dialogs: Dialog) -> float | None:
        return compare_model(chat_policy(), CHAT, dialogs, [], None, ComparisonConfig()).answer_loss

    assert loss(too_long) is None
    assert loss(too_long, short) == loss(short) is not None
