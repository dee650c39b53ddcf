"""Keys of the prefix cache: equal keys mean equal KV."""

from __future__ import annotations

import struct
from array import array
from hashlib import sha256

from jaxpaged.request import Sequence


def root_key(cache_salt: str | None, epoch: int) -> bytes:
    """Parent key of a sequence's first block. Different salts or epochs share nothing below it.

    Args:
        cache_salt: only requests with the same salt share blocks; None is its own value, not "".
        epoch: number of times the cache has been emptied, so that keys from before lead nowhere.
    """
    salt = b"none" if cache_salt is None else b"salt" + cache_salt.encode(errors="surrogatepass")
    return sha256(b"jaxpaged/prefix" + struct.pack("<q", epoch) + salt).digest()


def extend_keys(sequence: Sequence, num_blocks: int, block_size: int, epoch: int) -> None:
    """Extend `sequence.block_keys` to its first `num_blocks` blocks, which must be full of known tokens.

    A key is SHA-256 over the parent block's key and the block's token ids (int32): a chain, so a key
    stands for everything up to the end of its block.
    """
    keys = sequence.block_keys
    if len(keys) >= num_blocks:
        return
    parent = keys[-1] if keys else root_key(sequence.request.cache_salt, epoch)
    tokens = sequence.tokens(len(keys) * block_size, num_blocks * block_size)
    data = array("i", tokens).tobytes()
    for start in range(0, len(data), 4 * block_size):
        parent = sha256(parent + data[start : start + 4 * block_size]).digest()
        keys.append(parent)
