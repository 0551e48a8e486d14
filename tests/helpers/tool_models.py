"""Small models with chat templates that have tools, and answers that are scripted."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

from lm.inference.generation_request import Generation
from lm.inference.sampler import TokenScore
from lm.tokenizer.chat_settings import ChatSettings
from lm.tokenizer.tokenizer import Tokenizer
from tests.helpers.published_chat import TEMPLATE_FOLDER
from tests.helpers.tokenizers import make_tokenizer

LLAMA_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
    {%- if tools and loop.first %}{{- 'Answer with JSON to call one of ' + (tools | tojson) + '\\n' }}{%- endif %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length > 1 %}{{- raise_exception('One call at a time!') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}
    {%- else %}
        {{- message.content }}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
"""In the form of Llama 3's, whose own template is under a licence of its vendor."""
_SPECIALS = {
    "llama": ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"],
    "mistral": ["</s>", "<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"],
    "granite": ["<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"],
}
_QWEN_SPECIALS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
_TEMPLATES = {
    "qwen": "Qwen-Qwen2.5-7B-Instruct",
    "qwen3": "Qwen-Qwen3-0.6B",
    "qwq": "Qwen-QwQ-32B",
    "deepseek": "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "mistral": "mistralai-Mistral-Nemo-Instruct-2407",
    "granite": "ibm-granite-granite-3.3-2B-Instruct",
}
_ENDS = {"llama": "<|eot_id|>", "mistral": "</s>", "granite": "<|end_of_text|>"}

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Says the weather.",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "maxLength": 6},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["place", "days"],
            "additionalProperties": False,
        },
    },
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now", "parameters": None}}


@cache
def tool_tokenizer(family: str, source: str | None = None) -> Tokenizer:
    """Return a tokenizer with the chat template of a family, or with a ``source`` and the tokens of the family."""
    if source is None and family != "llama":
        source = (TEMPLATE_FOLDER / f"{_TEMPLATES[family]}.jinja").read_text(encoding="utf-8")
    tokenizer = make_tokenizer(special_tokens=_SPECIALS.get(family, _QWEN_SPECIALS))
    end = _ENDS.get(family, "<|im_end|>")
    tokens = {"bos_token": "", "eos_token": end}
    tokenizer.chat = ChatSettings({"default": source or LLAMA_TEMPLATE}, tokens, (tokenizer.special_ids[end],))
    return tokenizer


@contextmanager
def scripted_answers(tokenizer: Tokenizer, *answers: str) -> Iterator[None]:
    """Make a generation with the seed i answer with text i, whose special tokens are tokens. Then it ends."""
    scripts: Sequence[list[int]] = [[*tokenizer.encode(answer), min(tokenizer.stop_ids)] for answer in answers]
    append = Generation.append

    def append_scripted(self: Generation, token_id: int, score: TokenScore | None) -> None:
        append(self, scripts[self.seed % len(scripts)][len(self.ids)], score)

    with patch.object(Generation, "append", append_scripted):
        yield
