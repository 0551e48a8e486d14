"""The device that a model runs on."""

import torch

from lm.errors import UserError


def choose_device(device: str) -> torch.device:
    """The device named, or for ``auto`` the best there is; raises UserError when this machine does not have it."""
    found = [
        "cpu",
        *(["cuda"] if torch.cuda.is_available() else []),
        *(["mps"] if torch.backends.mps.is_available() else []),
    ]
    try:
        chosen = torch.device(found[-1] if device == "auto" else device)
        torch.empty(0, device=chosen)
    except Exception as error:  # torch raises a kind of its own for each way of missing it
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"The device {device!r} cannot be used; this machine has {', '.join(found)}. ({reason})"
        ) from None
    return chosen
