"""``loongforge doctor``: what would go wrong, looked at before a run."""

from __future__ import annotations

import os
import platform
import resource
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

GIB = 2**30
PACKAGES = (
    "torch",
    "numpy",
    "av",
    "pyarrow",
    "transformers",
    "safetensors",
    "loongforge-comm",
    "loongforge-mem",
    "loongforge-data",
    "loongforge-fuse",
)


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that was looked at. ``state`` is ok, warn, or bad."""

    name: str
    state: str
    detail: str
    remedy: str = ""


def examine(*, dataset: str | None = None, output: Path = Path("runs")) -> list[Check]:
    """Run all checks; a check that itself fails is reported, never raised."""
    checks: list[Callable[[], list[Check]]] = [
        versions,
        gpu,
        nccl,
        codecs,
        shared_memory,
        limits,
        lambda: disk(output),
        lambda: data_set(dataset),
    ]
    found: list[Check] = []
    for check in checks:
        try:
            found += check()
        except Exception as error:  # an optional library may fail in any way; the doctor goes on
            name = getattr(check, "__name__", "check")
            found.append(Check(name=name, state="warn", detail=f"could not look: {error}"))
    return found


def versions() -> list[Check]:
    """Python and package versions; a missing pillar is a warning."""
    found = [f"python {platform.python_version()}"]
    missing = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            missing.append(name)
    checks = [Check(name="versions", state="ok", detail=", ".join(found))]
    if missing:
        remedy = f"pip install {' '.join(missing)}"
        checks.append(Check(name="packages", state="warn", detail=f"not installed: {missing}", remedy=remedy))
    return checks


def gpu() -> list[Check]:
    """Driver, GPUs and their free memory."""
    import torch

    if not torch.cuda.is_available():
        driver = Path("/proc/driver/nvidia/version")
        if driver.exists():
            detail = f"a driver is there ({driver.read_text().splitlines()[0]}) but torch cannot use it"
            remedy = (
                f"torch is built for CUDA {torch.version.cuda}: update the driver or install a matching torch"
            )
            return [Check(name="gpu", state="bad", detail=detail, remedy=remedy)]
        return [Check(name="gpu", state="warn", detail="no NVIDIA GPU: training runs on the CPU")]
    checks = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        busy = free < 0.9 * total
        checks.append(
            Check(
                name=f"gpu {index}",
                state="warn" if busy else "ok",
                detail=f"{torch.cuda.get_device_name(index)}, {free / GIB:.1f} of {total / GIB:.1f} GiB free",
                remedy="another process uses this GPU: see nvidia-smi" if busy else "",
            )
        )
    return checks


def nccl() -> list[Check]:
    """NCCL, and settings that are known to hang small machines."""
    import torch
    from torch import distributed

    if not distributed.is_available():
        return [Check(name="distributed", state="bad", detail="torch was built without distributed")]
    if not (torch.cuda.is_available() and distributed.is_nccl_available()):
        return [Check(name="nccl", state="ok", detail="not needed without a GPU; Gloo is used")]
    version = ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    return [Check(name="nccl", state="ok", detail=f"NCCL {version}")]


def codecs() -> list[Check]:
    """Video decoders that robot data sets need."""
    try:
        import av
    except ImportError:
        return [Check(name="codecs", state="bad", detail="PyAV is missing", remedy="pip install av")]
    needed = {"h264": "h264", "hevc": "hevc", "av1": "libdav1d", "vp9": "vp9"}
    missing = [name for name, decoder in needed.items() if decoder not in av.codecs_available]
    if missing:
        remedy = "install PyAV from its wheel, which brings these decoders"
        return [Check(name="codecs", state="warn", detail=f"no decoder for {missing}", remedy=remedy)]
    return [Check(name="codecs", state="ok", detail=f"decoders for {', '.join(needed)}")]


def shared_memory() -> list[Check]:
    """/dev/shm, which loader workers and the ring use."""
    usage = shutil.disk_usage("/dev/shm")
    small = usage.free < 2 * GIB
    return [
        Check(
            name="/dev/shm",
            state="warn" if small else "ok",
            detail=f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free",
            remedy="start the container with --shm-size=8g (or mount a larger tmpfs)" if small else "",
        )
    ]


def limits() -> list[Check]:
    """Open files, locked memory, cores."""
    files, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    few = files < 4096
    checks = [
        Check(
            name="open files",
            state="warn" if few else "ok",
            detail=f"{files} (most {most_files})",
            remedy="ulimit -n 65536" if few else "",
        ),
        Check(name="cores", state="ok", detail=f"{len(os.sched_getaffinity(0))} for this process"),
    ]
    if locked != resource.RLIM_INFINITY and locked < GIB:
        remedy = "ulimit -l unlimited, where pinned memory is refused"
        checks.append(
            Check(name="locked memory", state="ok", detail=f"{locked / 2**20:.0f} MiB", remedy=remedy)
        )
    return checks


def disk(output: Path) -> list[Check]:
    """Free space and renaming where checkpoints go."""
    folder = output
    while not folder.exists():
        folder = folder.parent
    usage = shutil.disk_usage(folder)
    small = usage.free < 20 * GIB
    writable = os.access(folder, os.W_OK)
    if not writable:
        return [
            Check(name="output", state="bad", detail=f"{folder} is not writable", remedy="choose --output")
        ]
    return [
        Check(
            name="output",
            state="warn" if small else "ok",
            detail=f"{folder.resolve()}: {usage.free / GIB:.0f} GiB free",
            remedy="a full-size checkpoint needs about 16 bytes a parameter; lower keep_last"
            if small
            else "",
        )
    ]


def data_set(path: str | None) -> list[Check]:
    """Open the data set and read its first and last sample."""
    if path is None:
        return []
    from loongforge_data import open_dataset

    try:
        opened = open_dataset(path)
        count = len(opened)
        if count == 0:
            return [Check(name="data set", state="bad", detail=f"{path} has no sample")]
        opened[0]
        opened[count - 1]
    except Exception as error:  # whatever is wrong with the data is the finding
        remedy = f"loongforge-data validate {path}"
        return [Check(name="data set", state="bad", detail=f"{path}: {error}", remedy=remedy)]
    return [Check(name="data set", state="ok", detail=f"{path}: {count} samples, first and last read")]
