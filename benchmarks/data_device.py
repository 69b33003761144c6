"""L2: copies of batches to the device, pageable against page-locked slots, and whether they hide behind
the step.

Batches of 32 pictures of 480x640 (29 MB uint8) go through the loader's ring and `DevicePrefetcher`.
Reported: the rate of the copies themselves (CUDA events on the side stream), and the share of the wall
time that a consumer with a fixed device step waits. Without a device the rows are skipped with a reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from _common import finish, parser, result, spread
from loongforge_data.loader import ADFEDataLoader


class Pictures:
    """Pictures that cost nothing to make."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._picture = np.zeros((480, 640, 3), np.uint8)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, object]:
        self._picture[0, 0] = index % 251
        return {"index": index, "image": self._picture}


def measure(*, pin: bool, epochs: int, samples: int) -> dict[str, object]:
    """Copy epochs of batches; returns the rates."""
    import torch
    from loongforge_data.device import DevicePrefetcher, images_to_half

    loader: ADFEDataLoader = ADFEDataLoader(
        Pictures(samples), 32, 4, pin_memory=pin, slots=8, slot_mb=32, persistent_workers=True
    )
    batches = DevicePrefetcher(loader, "cuda", images_to_half)
    step = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    rates, shares = [], []
    for epoch in range(epochs + 1):
        before, start = batches.stats(), time.perf_counter()
        for batch in batches:
            for _ in range(20):
                step = (step @ step).clamp(-1, 1)
            batch["image"].float().mean()
            torch.cuda.current_stream().synchronize()
        wall = time.perf_counter() - start
        after = batches.stats()
        moved = after["h2d_bytes"] - before["h2d_bytes"]
        busy = after["h2d_ms"] - before["h2d_ms"]
        if epoch:
            rates.append(moved / 1e6 / busy if busy else 0.0)
            shares.append((after["data_wait_ms"] - before["data_wait_ms"]) / 1e3 / wall)
    row = {
        "memory": "page-locked slots" if pin else "pageable, staged",
        "copy_and_convert_gb_per_s": spread(rates),
        "wait_share": spread(shares),
        "pinned_mb": loader.stats()["pinned_bytes"] / 1e6,
        "pin_reason": loader.stats()["pin_reason"],
    }
    loader.close()
    return row


def guarded(call: Callable[[], dict[str, object]], name: str) -> dict[str, object]:
    """Run one part; an error becomes its row, so that the other parts still count."""
    try:
        return call()
    except Exception as error:
        return {"memory": name, "error": f"{type(error).__name__}: {error}"[:300]}


def main() -> None:
    """Measure, print, write."""
    arguments = parser(__doc__).parse_args()
    import torch

    rows: list[dict[str, object]] = []
    epochs, samples = (2, 640) if arguments.quick else (5, 3200)
    if not torch.cuda.is_available():
        rows.append({"memory": "all", "skipped": "torch sees no CUDA device"})
    else:
        for pin, name in ((False, "pageable, staged"), (True, "page-locked slots")):
            rows.append(guarded(lambda pin=pin: measure(pin=pin, epochs=epochs, samples=samples), name))
    rates = {str(row["memory"]): row.get("copy_and_convert_gb_per_s") for row in rows}
    pinned = rates.get("page-locked slots")
    shares = [
        row["wait_share"] for row in rows if row["memory"] == "page-locked slots" and "wait_share" in row
    ]
    numbers = {
        "h2d_pinned_gb_per_s": pinned["median"] if isinstance(pinned, dict) else None,
        "device_wait_share": shares[0]["median"] if shares and isinstance(shares[0], dict) else None,
    }
    finish(result("data_device", rows=rows, figures=numbers, repetitions=epochs), arguments.json)


if __name__ == "__main__":
    main()
