"""Read YAML files of options."""

from pathlib import Path
from typing import Any

import yaml

from lm.common.errors import UserError

_MERGE_TAG, _TEXT_TAG = "tag:yaml.org,2002:merge", "tag:yaml.org,2002:str"


class _Loader(yaml.SafeLoader):
    """Refuses a key that is repeated, whose first value would be lost, and one that is not text."""

    are_number_keys_text = False

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Return the node of a mapping, before other mappings are merged into it: these may have the same keys."""
        node = super().compose_mapping_node(anchor)
        keys = set[str]()
        for key_node, _ in node.value:
            if key_node.tag == _MERGE_TAG:
                continue
            key: Any = self.construct_object(key_node, deep=True)
            if self.are_number_keys_text and type(key) in (int, float):  # not bool
                key_node.tag, key = _TEXT_TAG, key_node.value
                self.constructed_objects.pop(key_node)
            if not isinstance(key, str):
                problem = f"the key {key!r} is not text; a name of digits, or such as yes, needs quotes"
            elif key in keys:
                problem = f"the key {key!r} is given twice"
            else:
                keys.add(key)
                continue
            raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
        return node


class _NumberKeyLoader(_Loader):
    """Takes keys that are numbers as text."""

    are_number_keys_text = True


def read_yaml(path: Path, are_number_keys_text: bool = False) -> Any:
    """Return the content of a YAML file. Raise UserError, which names the file, if it cannot be read.

    ``are_number_keys_text``: take keys that are numbers, such as the names of sizes, as text instead of refusing them.
    """
    try:
        with path.open(encoding="utf-8") as file:
            loader = _NumberKeyLoader(file) if are_number_keys_text else _Loader(file)
            return loader.get_single_data()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8: {error}.") from None
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
