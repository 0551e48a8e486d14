"""The model card of an exported model: the README.md that Hugging Face's pages show."""

import json

from lm.model.transformer import TransformerLM
from lm.tokenizer.tokenizer import Tokenizer

_CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- textmill
---

# {name}

A language model of {parameters:,} parameters, a `{class_name}` with a context of {context:,} tokens. Its tokenizer is a
byte-level BPE of {ids:,} ids. Made with textmill.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({literal})
model = AutoModelForCausalLM.from_pretrained({literal}, dtype="auto")
inputs = tokenizer("Once upon a time", return_tensors="pt", return_token_type_ids=False)
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))
```
"""


def make_model_card(name: str, class_name: str, model: TransformerLM, tokenizer: Tokenizer, details: str = "") -> str:
    """Return a model card in Markdown. ``details`` are further sections: how the model was made."""
    card = _CARD.format(
        name=name,
        literal=json.dumps(name, ensure_ascii=False),
        class_name=class_name,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        context=model.config.context_length,
        ids=tokenizer.size,
    )
    return f"{card}\n{details.strip()}\n" if details else card
