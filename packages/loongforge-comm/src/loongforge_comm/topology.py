"""What connects the devices of this host, read where NVML is there."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def describe_topology(device: torch.device) -> dict[str, object]:
    """Names of the GPUs, NVLink counts and PCIe generations of this host; for CPUs the network interface in
    use.

    Opens NVML only for CUDA devices and only when the ``nvml`` extra is installed; says so when it is not.
    """
    if device.type != "cuda":
        name = os.environ.get("GLOO_SOCKET_IFNAME", "")
        return {"kind": "cpu", "interface": name, "speed_mbit": _interface_speed(name)}
    result: dict[str, object] = {"kind": "cuda", "gpu": torch.cuda.get_device_name(device)}
    try:
        import pynvml
    except ImportError:
        result["nvml"] = "not installed (extra 'nvml')"
        return result
    try:
        pynvml.nvmlInit()
        try:
            result["gpus"] = [_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        result["nvml"] = f"failed: {error}"
    return result


def _gpu(nvml: object, index: int) -> dict[str, object]:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)  # type: ignore[attr-defined]
    links = 0
    for link in range(18):
        try:
            links += int(nvml.nvmlDeviceGetNvLinkState(handle, link))  # type: ignore[attr-defined]
        except nvml.NVMLError:  # type: ignore[attr-defined]
            break
    try:
        generation = int(nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle))  # type: ignore[attr-defined]
    except nvml.NVMLError:  # type: ignore[attr-defined]
        generation = 0
    return {"nvlinks": links, "pcie_generation": generation}


def _interface_speed(name: str) -> int | None:
    try:
        return int(Path(f"/sys/class/net/{name}/speed").read_text()) if name else None
    except (OSError, ValueError):
        return None
