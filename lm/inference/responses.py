"""Responses of a model to many prompts, each as soon as it is complete."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lm.common.errors import UserError
from lm.data.dialogs import Message
from lm.hardware.device import explain_out_of_memory
from lm.inference.chat_format import Answer, ChatFormat
from lm.inference.completion import OUT_OF_MEMORY, TextStream, check_vocabulary, create_text_generation, encode_prompt
from lm.inference.config import SampleConfig
from lm.inference.engine import Generation, generate_each
from lm.model.transformer import TransformerLM
from lm.tokenizer.text_tokenizer import TextTokenizer

_MAX_BATCH_SIZE = 32


@dataclass(frozen=True)
class ModelResponse:
    """The response to a numbered prompt."""

    index: int
    text: str
    num_tokens: int
    finish_reason: str


def respond(
    model: TransformerLM,
    tokenizer: TextTokenizer,
    prompts: Sequence[tuple[int, str | Sequence[Message]]],
    config: SampleConfig,
) -> Iterator[ModelResponse]:
    """Yield the response to each numbered prompt, in the order in which they end.

    A text is continued; a dialog is answered in the model's chat format. A response ends before a special token, a text
    of ``config.stop``, after ``config.max_new_tokens``, or at the end of the context. Prompt i has the seed
    ``config.seed`` + i, so a response does not depend on the other prompts. Raises UserError if a prompt leaves no room
    in the context, before anything is computed.
    """
    check_vocabulary(model, tokenizer.size)
    chat_format = ChatFormat(tokenizer)
    prompt_of = dict(prompts)
    runs: dict[Generation, tuple[int, TextStream, list[str]]] = {}
    for index, prompt in prompts:
        ids = encode_prompt(tokenizer, prompt) if isinstance(prompt, str) else chat_format.encode(prompt)
        room = model.config.context_length - len(ids)
        if room <= 0:
            raise UserError(
                f"Prompt {index} has {len(ids)} tokens, which leaves no room for a response in the model's context of "
                f"{model.config.context_length}. Use fewer or shorter examples, or a model with a longer context."
            )
        stops = [] if isinstance(prompt, str) else chat_format.stop
        sampling = replace(
            config, max_new_tokens=min(config.max_new_tokens, room), stop=[*config.stop, *stops], prompts=[]
        )
        pieces: list[str] = []
        generation, text = create_text_generation(tokenizer, ids, sampling, config.seed + index, pieces.append)
        runs[generation] = index, text, pieces
    with explain_out_of_memory(OUT_OF_MEMORY):
        for generation in generate_each(model, list(runs), _MAX_BATCH_SIZE):
            index, text, pieces = runs[generation]
            response = "".join(pieces) + text.finish()
            if not isinstance(prompt_of[index], str):
                response = Answer(chat_format).add(response)
            yield ModelResponse(index, response, len(generation.ids), generation.finish_reason or "stop")
