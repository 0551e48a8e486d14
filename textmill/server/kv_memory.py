"""The memory for the keys and values of a server's completions."""

import torch

from lm.hardware.memory import free_memory
from lm.inference.scheduler import Scheduler
from lm.model.transformer import TransformerLM

_UNITS = ("kB", "MB", "GB", "TB")


def free_bytes(model: TransformerLM) -> int:
    """Return the bytes of memory that are free on the model's device."""
    device = model.head_weight.device
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()


def describe_kv_memory(scheduler: Scheduler, wanted_context: int) -> str:
    """Return a line that tells the user how much memory the keys and values take, and for how many tokens.

    ``wanted_context`` is the number of tokens that a request should be able to have.
    """
    context, number, unit = scheduler.max_seq_len, scheduler.kv_bytes / 1000, _UNITS[0]
    for larger in _UNITS[1:]:
        if number < 1000:
            break
        number, unit = number / 1000, larger
    text = f"KV cache: up to {number:.3g} {unit} of memory, for {scheduler.kv_tokens:,} tokens; "
    if context < wanted_context:
        return f"{text}a request can have only {context:,} of the {wanted_context:,}. Set --kv_memory higher for more."
    return f"{text}a request can have {context:,}."
