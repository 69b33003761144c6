"""GPU utilisation through NVML, loaded at first use and silent where it is not there."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import torch

EVERY_S = 1.0
"""Seconds between two questions to the driver, which may take milliseconds to answer."""


class Utilisation:
    """Asks for a GPU's utilisation in a thread of its own; calling it returns the last answer.

    The thread begins with the first call and ends with this object or with :meth:`close`.

    Args:
        read: Asks the driver: percent, or None where it has no answer.
    """

    def __init__(self, read: Callable[[], float | None]) -> None:
        self._read = read
        self._last: list[float | None] = [None]
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._end.set)

    def __call__(self) -> float | None:
        """Return the last answer in percent, None before the first one."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_ask, args=(self._read, self._last, self._end), name="loongforge-nvml", daemon=True
            )
            self._thread.start()
        return self._last[0]

    def close(self) -> None:
        """End the thread."""
        self._end.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)


def _ask(read: Callable[[], float | None], last: list[float | None], end: threading.Event) -> None:
    while True:
        last[0] = read()
        if end.wait(EVERY_S):
            return


def utilisation_reader(device: torch.device) -> Utilisation | None:
    """Return what knows the GPU's utilisation in percent, or None on the CPU or without NVML.

    The device is found by its UUID, so ``CUDA_VISIBLE_DEVICES`` does not mislead.
    """
    if device.type != "cuda":
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
    except Exception:
        return None

    def read() -> float | None:
        try:
            return float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        except pynvml.NVMLError:
            return None

    return Utilisation(read)
