"""Pools in simulated GPU memory: what is in their blocks, and what of their mirror takes memory."""

import os
from dataclasses import replace

import torch
from contract.fake_cuda import make_pool
from transfer_kit import LAYOUT, NUM_BLOCKS

from neuron_di.kv import KvPool, head_bytes
from neuron_di.kv.device_pool import DevicePool
from neuron_di.transfer import ShmEngine
from neuron_di.transfer.cuda_ipc_engine import CudaIpcEngine
from neuron_di.transfer.tcp_engine import TcpEngine
from neuron_di.types import BlockId

PAGED = replace(LAYOUT, num_layers=2, num_kv_heads=4, head_dim=64)  # a block is four pages
MAKE_POOL = {"gpu": make_pool, "host": KvPool.create}
ENGINES = {"cuda_ipc": CudaIpcEngine, "tcp": TcpEngine, "shm": ShmEngine}
ALL = [BlockId(n) for n in range(NUM_BLOCKS)]


def engine_of(name, pool):
    """As make_engines makes it."""
    if isinstance(pool, DevicePool):
        pool.keeps_mirror = name == "shm"
    return ENGINES[name](pool)


def side(where, engine, layout=PAGED):
    """What makes a worker of the cluster's."""
    return {
        "layout": layout,
        "converts": True,
        "make_pool": MAKE_POOL[where],
        "make_transfer": lambda pool: engine_of(engine, pool),
    }


def compute(pool):
    """Every element another number, on the device where there is one."""
    pool.begin_fill(ALL)
    shape = pool.tensor().shape[1:]
    for block_id in ALL:
        numbers = torch.arange(shape.numel()).reshape(shape)
        pool.tensor()[block_id] = (block_id * 7919 + numbers) % 251
    pool.end_fill(ALL, NUM_BLOCKS * pool.layout.block_size)


def blocks_of(pool, block_ids):
    """[N, L, C, K, S, D], from where what computes reads them. A copy."""
    blocks = pool.read_blocks(block_ids) if isinstance(pool, DevicePool) else None
    if blocks is None:
        return pool.tensor()[list(block_ids)].clone()
    dtype = getattr(torch, pool.layout.dtype)
    whole = b"".join(bytes(block) for block in blocks)
    return torch.frombuffer(bytearray(whole), dtype=dtype).view(-1, *pool.layout.rank_shape)


def tokens_of(pool, block_ids, num_tokens):
    """[L, C, K, S, D], as float32."""
    tensor = blocks_of(pool, block_ids).float().permute(1, 2, 3, 0, 4, 5)
    return tensor.reshape(*tensor.shape[:3], -1, tensor.shape[-1])[:, :, :, :num_tokens]


def mirror_bytes(pool):
    """Of memory that the mirror takes now."""
    pool.generations(pool.block_ids())  # their pages are there, then
    return os.fstat(pool.region().fd).st_blocks * 512 - head_bytes(pool.num_blocks)
