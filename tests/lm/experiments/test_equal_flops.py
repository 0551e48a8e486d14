"""Bits per byte at equal FLOPs: how the budget is spent, and what is made of the trials."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.common.errors import UserError
from lm.experiments.budget import MIN_STEPS
from lm.experiments.equal_flops import spend_flops, summarize_trials
from lm.experiments.trial import TrialResult
from lm.model.config import ModelConfig
from lm.model.flops import flops_per_token
from lm.train.config import TrainConfig

MODEL = ModelConfig(context_length=16, d_model=8, num_layers=1, num_heads=1, d_ff=16)
FINISHED = TrialResult("finished", "", 60, 960, 100, 1e9, 2.0, 2.0, 1.5, [])


@given(st.sampled_from([257, 512, 4096, 50_257]), st.floats(0, 1))
def test_each_vocabulary_gets_the_same_flops_up_to_half_a_step(vocab_size: int, more: float) -> None:
    train = TrainConfig(batch_size=4)
    step = flops_per_token(replace(MODEL, vocab_size=vocab_size)) * 4 * 16
    flops = step * MIN_STEPS * 10**more
    model, spent = spend_flops(flops, MODEL, train, vocab_size, "one")
    assert model == replace(MODEL, vocab_size=vocab_size)
    assert abs(spent.steps * step - flops) <= step / 2 * (1 + 1e-9)
    assert spent.warmup_steps < spent.steps and spent.eval_interval <= spent.steps
    assert replace(spent, steps=train.steps) == replace(
        train,
        warmup_steps=spent.warmup_steps,
        eval_interval=spent.eval_interval,
        checkpoint_interval=spent.checkpoint_interval,
    )


def test_a_budget_of_too_few_steps_names_the_tokenizer_and_a_budget_that_is_enough() -> None:
    with pytest.raises(
        UserError, match=r"pay for 0 steps of a model with the 50,257 ids of gpt2.* Raise --train_flops"
    ):
        spend_flops(1e3, MODEL, TrainConfig(), 50_257, "gpt2")


def test_the_error_is_that_of_the_mean_of_the_seeds() -> None:
    assert summarize_trials([FINISHED], "one").error is None
    loss = summarize_trials([FINISHED, replace(FINISHED, valid_bits_per_byte=1.7)], "one")
    assert loss.bits_per_byte == pytest.approx(1.6) and loss.error == pytest.approx(0.1)
    assert (loss.steps, loss.tokens, loss.flops) == (60, 960, 1e9)


def test_a_training_that_did_not_finish_is_an_error() -> None:
    failed = replace(FINISHED, state="diverged", reason="at step 3 the loss was not finite.", valid_bits_per_byte=None)
    with pytest.raises(UserError, match=r"tokenizer one has no loss.*diverged: at step 3"):
        summarize_trials([FINISHED, failed], "one")
