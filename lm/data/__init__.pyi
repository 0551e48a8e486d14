from .batches import get_batch as get_batch
from .chat_template import add_chat_tokens as add_chat_tokens
from .chat_template import encode_chat_prompt as encode_chat_prompt
from .chat_template import encode_dialog as encode_dialog
from .dialog_formats import read_dialogs as read_dialogs
from .packing import pack_examples as pack_examples
from .token_shards import TokenShards as TokenShards
from .token_shards import write_shard as write_shard
