from .batches import get_batch as get_batch
from .token_shards import TokenShards as TokenShards
from .token_shards import write_shard as write_shard
