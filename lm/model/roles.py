"""Roles of parameters, stated by the module that owns them as its attribute ``role``.

query_key: a matrix whose output is rotated by position. value_output: the other matrices of attention. feed_forward: a
matrix, or a stack of the matrices of experts. router: the matrix that scores experts. gain: the scales of a norm.
bias: what a layer adds to its product; its module states it as ``bias_role``.
Optimizers, parameter counts and the Hugging Face exporter follow the roles, not names or shapes.
"""

from typing import Literal

Role = Literal["embedding", "query_key", "value_output", "feed_forward", "router", "gain", "bias", "head"]
HIDDEN_MATRICES: frozenset[Role] = frozenset(["query_key", "value_output", "feed_forward"])
