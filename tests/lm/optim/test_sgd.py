"""SGD against its formula."""

import math

from lm.optim.sgd import SGD
from tests.helpers.optimizers import assert_all_close, make_parameters, set_gradients


def test_sgd_equals_formula() -> None:
    """p ← p - lr / sqrt(t + 1) · grad, where t counts the parameter's own steps."""
    params, expected = make_parameters([(3, 2), (4,)]), [p.detach().clone() for p in make_parameters([(3, 2), (4,)])]
    optimizer = SGD(params, lr=0.3)
    counts = [0, 0]
    for step in range(12):
        set_gradients(params, step, missing=True)
        for n, p in enumerate(params):
            if p.grad is not None:
                expected[n] -= 0.3 / math.sqrt(counts[n] + 1) * p.grad
                counts[n] += 1
        optimizer.step()
    assert counts == [8, 8]
    assert_all_close(params, expected)
