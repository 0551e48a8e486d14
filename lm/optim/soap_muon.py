"""SOAP-Muon: Muon on a momentum that is preconditioned in the eigenbasis of the gradients.

SOAP (Vyas et al. 2024) runs Adam in the eigenbasis of Shampoo's covariances. Here only its preconditioning is used,
before the orthogonalization, as in the benchmark of optimizers of modded-nanogpt (track 3).
"""

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor

from lm.optim.muon import Muon
from lm.optim.shards import gather

_EPS = 1e-8


class SoapMuon(Muon):
    """:class:`lm.optim.muon.Muon` with SOAP's preconditioning of the momentum, on the smaller side of each matrix.

    A running mean of G Gᵀ (for a tall matrix Gᵀ G), with rate ``beta2``, has the orthonormal basis Q of its
    eigenvectors. Each number of the momentum in this basis is divided by the root of the running mean of the squared
    gradients in it. Q starts as the identity; each step improves it by one power iteration and a QR decomposition, in
    the dtype of the parameters. The other side of the matrix keeps its basis: its covariance is larger, and its QR
    decompositions would take longer than the rest of the step.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, beta2: float = 0.95, **options: Any) -> None:
        if not 0 <= beta2 < 1:
            raise ValueError(f"beta2 {beta2} must be in [0, 1)")
        super().__init__(params, lr, **options)
        self.beta2 = beta2

    def state_shape(self, name: str, parameter: Tensor) -> torch.Size:
        """Return the shape of a tensor of a parameter's state."""
        side = min(parameter.shape[-2:])
        is_square = name in ("covariance", "basis")
        return torch.Size([*parameter.shape[:-2], side, side]) if is_square else parameter.shape

    def find_updates(self, momenta: Tensor, params: list[Tensor], is_applied: float | Tensor) -> tuple[Tensor, float]:
        """See :meth:`lm.optim.muon.Muon.find_updates`."""
        pairs = zip(params, momenta, strict=True)
        preconditioned = [self._precondition(p, momentum, is_applied) for p, momentum in pairs]
        return super().find_updates(torch.stack(preconditioned), params, is_applied)

    def _precondition(self, p: Tensor, momentum: Tensor, is_applied: float | Tensor) -> Tensor:
        is_tall = momentum.shape[-2] > momentum.shape[-1]
        grad = gather(cast(Tensor, p.grad))
        if is_tall:
            grad, momentum = grad.mT, momentum.mT
        state, rate = self.state[p], is_applied * (1 - self.beta2)
        if "basis" not in state:
            identity = torch.eye(grad.shape[-2], dtype=grad.dtype, device=grad.device)
            state["basis"] = identity.expand(*grad.shape[:-2], -1, -1).clone()
            state["covariance"] = torch.zeros_like(state["basis"])
            state["square"] = torch.zeros_like(grad.mT if is_tall else grad, memory_format=torch.contiguous_format)
        for name in ("basis", "covariance", "square"):
            state[name] = gather(state[name])  # whole on each rank that shares the parameter, also after a resume
        basis, covariance, square = state["basis"], state["covariance"], state["square"]
        rotated_grad = basis.mT @ grad
        (square.mT if is_tall else square).lerp_(rotated_grad.square(), rate)
        rotated = (basis.mT @ momentum) / ((square.mT if is_tall else square).sqrt() + _EPS)
        out = basis @ rotated
        covariance.lerp_(grad @ grad.mT, rate)
        improved = torch.linalg.qr(covariance @ basis).Q
        basis.copy_(improved if isinstance(is_applied, float) else torch.where(is_applied != 0, improved, basis))
        return out.mT if is_tall else out
