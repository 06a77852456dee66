"""A process with a device pool: fills slot s with s + 1 (index planes: s + 101), says where it is, and reuses the slots
that it is told on standard input."""

import json
import sys

import torch

from headrace.kvstore.copiers.ipc import export_pool
from headrace.kvstore.generations import Generations
from headrace.kvstore.layout import SlabLayout
from headrace.kvstore.pool import DevicePool
from headrace.messages import encode

SLOTS = 6


def main():
    spacer = torch.zeros(12_345, dtype=torch.uint8, device="cuda")  # so that planes begin inside an allocation
    pool, counts = DevicePool(SlabLayout(3, (0, 2), True, "tile656"), SLOTS, "cuda"), Generations.create(SLOTS)
    for slot in range(SLOTS):
        pool.latent[:, slot] = slot + 1
        pool.index[:, slot] = slot + 101
    torch.cuda.synchronize()
    export = encode(export_pool(pool, counts)).hex()
    print(json.dumps({"export": export, "promised": counts.of(range(SLOTS))}), flush=True)
    for line in sys.stdin:
        counts.advance([int(line)])
        pool.latent[:, int(line)] = 77
        torch.cuda.synchronize()
        print("done", flush=True)
    del spacer


if __name__ == "__main__":
    main()
