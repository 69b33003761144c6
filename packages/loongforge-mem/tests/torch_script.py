"""Run in a process of its own by test_mem_native.py: torch's own pluggable allocator over host memory.

A stand-in for two calls of the CUDA runtime is loaded before torch, so no GPU is needed.
"""

import json
import sys

import torch
from loongforge_mem import _core
from loongforge_mem.allocator import connect_errors, connect_hooks

MIB = 1 << 20


def main() -> None:
    _core.configure("host", initial_bytes=0, grow_bytes=16 * MIB, limit_bytes=64 * MIB)
    expected = connect_errors(torch)
    table = _core.c_abi()
    custom = torch._C._cuda_customAllocator(table["alloc"], table["free"])
    connect_hooks(custom, table)
    torch._C._cuda_changeCurrentAllocator(custom)
    alloc, free = (
        torch._C._cuda_cudaCachingAllocator_raw_alloc,
        torch._C._cuda_cudaCachingAllocator_raw_delete,
    )
    free(alloc(MIB, 0))
    kind, text = None, ""
    try:
        alloc(1 << 30, 0)
    except RuntimeError as error:
        kind, text = type(error), str(error)
    for _ in range(1000):
        free(alloc(5 * MIB, 0))
        try:
            alloc(1 << 30, 0)
        except torch.OutOfMemoryError:
            continue
        except RuntimeError:
            break
    name = f"{kind.__module__}.{kind.__qualname__}" if kind else None
    ooms = _core.global_stats(0)["ooms"]
    sys.stdout.write(json.dumps({"expected": expected, "kind": name, "text": text, "ooms": ooms}) + "\n")


if __name__ == "__main__":
    main()
