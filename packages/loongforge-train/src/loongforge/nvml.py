"""GPU utilisation through NVML, loaded at first use and silent where it is not there."""

from __future__ import annotations

from collections.abc import Callable

import torch


def utilisation_reader(device: torch.device) -> Callable[[], float | None] | None:
    """Return a function that reads the GPU's utilisation in percent, or None on the CPU or without NVML.

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

    return read
