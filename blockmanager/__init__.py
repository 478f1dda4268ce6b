"""Paged KV memory: block pool, page tables, copy-on-write, prefix cache, swap, and the KV ledger."""

from blockmanager.content import (
    NO_EXTRA_KEYS,
    Content,
    ExtraKeys,
    HashedContent,
    KeyChain,
    TokenContent,
)
from blockmanager.manager import BlockManager, Growth
from blockmanager.pool import BlockPool, NoFreeBlocksError
from blockmanager.prefix_cache import PrefixCache
from blockmanager.table import BlockCopy, BlockTable, BlockTransfer

__all__ = [
    "NO_EXTRA_KEYS",
    "BlockCopy",
    "BlockManager",
    "BlockPool",
    "BlockTable",
    "BlockTransfer",
    "Content",
    "ExtraKeys",
    "Growth",
    "HashedContent",
    "KeyChain",
    "NoFreeBlocksError",
    "PrefixCache",
    "TokenContent",
]
