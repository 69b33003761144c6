"""Random state as plain tensors, and seeds that do not depend on how many ranks there are.

numpy and Python keep their generator state in objects that ``torch.load(weights_only=True)`` refuses; here
they are int64 tensors (faults T06, T15).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from loongforge.errors import CheckpointError

_MASK = (1 << 64) - 1


def mix(*parts: int) -> int:
    """Return a 63-bit seed from integers by SplitMix64 steps: near inputs give unrelated seeds."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = (state + (part & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def seed_rank(seed: int, rank: int) -> None:
    """Seed Python, numpy and torch (all devices) of this process: distinct per rank, reproducible."""
    value = mix(seed, rank, 1)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)  # noqa: NPY002 - user code draws from the global generator
    torch.manual_seed(value)


def capture_rng() -> dict[str, Tensor]:
    """Return the state of every global generator of this process as tensors."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002
    if name != "MT19937":
        msg = f"numpy's global generator is {name}: allowed is MT19937; do not replace it"
        raise CheckpointError(msg)
    state = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.tensor([*np.asarray(keys).tolist(), int(position), int(has_gauss)], dtype=torch.int64),
        "numpy_gauss": torch.tensor([float(cached)], dtype=torch.float64),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for index in range(torch.cuda.device_count()):
            state[f"cuda:{index}"] = torch.cuda.get_rng_state(index)
    return state


def restore_rng(state: Mapping[str, Tensor]) -> None:
    """Restore what :func:`capture_rng` returned and verify it.

    Raises:
        CheckpointError: A part is missing or did not take.
    """
    missing = [
        name for name in ("torch", "python", "python_gauss", "numpy", "numpy_gauss") if name not in state
    ]
    if missing:
        msg = f"the random state lacks {', '.join(missing)}: it was not written by this trainer"
        raise CheckpointError(msg)
    torch.set_rng_state(state["torch"].cpu())
    version, *words = state["python"].tolist()
    gauss = state["python_gauss"].tolist()
    random.setstate((version, tuple(words), gauss[0] if gauss else None))
    *keys, position, has_gauss = state["numpy"].tolist()
    cached = state["numpy_gauss"].item()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, cached))  # noqa: NPY002
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            if f"cuda:{index}" in state:
                torch.cuda.set_rng_state(state[f"cuda:{index}"].cpu(), index)
    again = capture_rng()
    wrong = [
        name for name in again if name in state and not torch.equal(again[name].cpu(), state[name].cpu())
    ]
    if wrong:
        msg = f"the random state of {', '.join(wrong)} could not be restored"
        raise CheckpointError(msg)


def sample_generators(seed: int, epoch: int, indices: Iterable[int]) -> list[torch.Generator]:
    """Return one CPU generator per sample, seeded by (seed, epoch, sample index).

    Draws keyed by the sample do not depend on rank, batch size, fusion or on what was drawn before, so two
    ranks with batch B draw the same numbers as one rank with batch 2B, and ranks differ because their samples
    differ.
    """
    generators = []
    for index in indices:
        generator = torch.Generator()
        generator.manual_seed(mix(seed, epoch, index, 2))
        generators.append(generator)
    return generators
