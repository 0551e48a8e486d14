"""How the files of a published model say that it chats: its templates, and the tokens that end an answer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ChatSettings:
    """Settings of a tokenizer that the files of its model state."""

    templates: dict[str, str] = field(default_factory=dict)
    """Jinja templates by name: ``default``, and for dialogs with tools maybe ``tool_use``."""
    tokens: dict[str, str] = field(default_factory=dict)
    """Variables of the templates, such as ``bos_token`` and ``eos_token``."""
    end_ids: tuple[int, ...] = ()
    """Ids that end a generation. Empty: the files name none."""
    generation: dict[str, Any] = field(default_factory=dict)
    """Other fields of ``generation_config.json``, such as the temperature, for an export."""

    @classmethod
    def parse(cls, content: Any) -> "ChatSettings":
        """Return the settings of a JSON object. Raises ValueError for another one."""
        try:
            parsed = cls(**{**content, "end_ids": tuple(content.get("end_ids", ()))})
        except (AttributeError, TypeError):
            raise ValueError("has no valid settings of a chat") from None
        texts = (parsed.templates, parsed.tokens)
        is_valid = all(
            isinstance(part, Mapping) and all(isinstance(text, str) for text in (*part, *part.values()))
            for part in texts
        )
        if not (is_valid and isinstance(parsed.generation, dict) and all(type(i) is int for i in parsed.end_ids)):
            raise ValueError("has no valid settings of a chat")
        return parsed
