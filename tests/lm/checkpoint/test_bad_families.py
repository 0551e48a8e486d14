"""Files of families that are refused: each message says which field of which file is at fault."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lm.checkpoint.hugging_face import load_hugging_face
from lm.common.errors import UserError
from tests.helpers.llamas import changed_config, make_exported


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (changed_config(rope_parameters={"rope_type": "yarn"}), "factor is missing; rope_type 'yarn' needs it"),
        (
            changed_config(rope_parameters={"rope_type": "yarn", "factor": 2.0, "truncate": False}),
            "truncate False is not supported",
        ),
        (
            changed_config(rope_parameters={"rope_type": "yarn", "factor": 2.0, "beta_fast": 0.5}),
            r"beta_fast 0\.5 must be above beta_slow 1\.0",
        ),
        (changed_config(rope_parameters={"rope_type": "longrope"}), "short_factor is None; rope_type 'longrope' needs"),
        (
            changed_config(rope_parameters={"rope_type": "longrope", "short_factor": [1.0]}),
            "divisors has 1 numbers; a head has 5 rotated pairs",
        ),
        (
            changed_config(rope_parameters={"rope_type": "longrope", "short_factor": [0] * 5}),
            "'longrope' has an unsupported field: .*divisors must be numbers above 0",
        ),
        (changed_config(model_type="smollm3", no_rope_layers=[1]), r"no_rope_layers is \[1\]; it must be a list"),
        (changed_config(model_type="smollm3", no_rope_layers=[0, 1]), r"no_rope_layers marks the layers \[0\]"),
        (changed_config(model_type="smollm3", no_rope_layer_interval=1), r"no_rope_layers marks the layers \[0, 1\]"),
        (
            changed_config(model_type="phi3", partial_rotary_factor=0.1),
            "rotary_fraction 0.1 of the head width 10",
        ),
        (changed_config(model_type="phi3", sliding_window=5), "sliding_window 5 is below the context of 64 tokens"),
    ],
)
def test_fields_that_are_not_supported_are_refused(tmp_path: Path, damage: Callable[[Path], Any], message: str) -> None:
    make_exported(tmp_path)
    damage(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        load_hugging_face(tmp_path)
    assert str(tmp_path) in str(caught.value)
