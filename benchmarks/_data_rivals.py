"""Other loaders, measured in their own environment: run by ``data_loader.py --rivals``, which asks for one
repetition at a time.

Each gives (image of one or all cameras, 16-step action window) samples in random order, batches of 16, 2
processes or threads; samples per second over ``batches`` batches after the first one.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path


def rate(make: Callable[[], Iterator[object]], *, batch: int, batches: int) -> float:
    """Return samples per second over some batches after the first one."""
    iterator = make()
    next(iterator)
    start = time.perf_counter()
    count = sum(1 for _, _ in zip(range(batches), iterator, strict=False))
    return count * batch / (time.perf_counter() - start)


def lerobot(root: Path, backend: str, *, batch: int, workers: int) -> Callable[[], Iterator[object]]:
    """LeRobotDataset in a torch DataLoader."""
    import torch
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    fps = json.loads((root / "meta" / "info.json").read_text())["fps"]
    dataset = LeRobotDataset(
        "local/set",
        root=root,
        delta_timestamps={"action": [i / fps for i in range(16)]},
        video_backend=backend,
    )
    loader = torch.utils.data.DataLoader(dataset, batch, shuffle=True, num_workers=workers, drop_last=True)
    return lambda: iter(loader)


def _files(root: Path) -> list[tuple[Path, int]]:
    import av

    found = []
    for path in sorted(root.glob("videos/**/*.mp4")):
        with av.open(str(path)) as container:
            found.append((path, container.streams.video[0].frames))
    return found


def _draws(root: Path) -> tuple[list[Path], Callable[[], tuple[list[Path], int]]]:
    """Return files, and a function that draws one sample: a random frame of each camera."""
    cameras: dict[str, list[tuple[Path, int]]] = {}
    for path, count in _files(root):
        cameras.setdefault(str(path.relative_to(root)).split("/")[1], []).append((path, count))
    first = next(iter(cameras.values()))
    number = random.Random(0)

    def draw() -> tuple[list[Path], int]:
        which = number.choices(range(len(first)), weights=[n for _, n in first])[0]
        index = number.randrange(min(files[which][1] for files in cameras.values() if which < len(files)))
        return [files[min(which, len(files) - 1)][0] for files in cameras.values()], index

    return [path for path, _ in first], draw


def spdl(root: Path, *, batch: int, workers: int, fps: float) -> Callable[[], Iterator[object]]:
    """SPDL: a demux, a decode and a conversion per random frame, in a thread pipeline."""
    import spdl.io
    from spdl.pipeline import PipelineBuilder

    _, draw = _draws(root)

    def source() -> Iterator[tuple[list[Path], int]]:
        while True:
            yield draw()

    def load(sample: tuple[list[Path], int]) -> list[object]:
        paths, index = sample
        result = []
        for path in paths:
            window = (max(0.0, (index - 0.5) / fps), (index + 0.5) / fps)
            packets = spdl.io.demux_video(str(path), timestamp=window)
            frames = spdl.io.decode_packets(
                packets, filter_desc=spdl.io.get_video_filter_desc(pix_fmt="rgb24")
            )
            result.append(spdl.io.to_numpy(spdl.io.convert_frames(frames)))
        return result

    def make() -> Iterator[object]:
        pipeline = (
            PipelineBuilder()
            .add_source(source())
            .pipe(load, concurrency=workers)
            .aggregate(batch)
            .add_sink(4)
        ).build(num_threads=workers)
        with pipeline.auto_stop():
            yield from pipeline.get_iterator(timeout=60)

    return make


def frames_by_process(root: Path, kind: str, *, batch: int, workers: int) -> Callable[[], Iterator[object]]:
    """Random frames in a torch DataLoader: torchcodec or plain PyAV with one cached decoder per file and
    process.
    """
    import numpy as np
    import torch

    _, draw = _draws(root)
    order = [draw() for _ in range(20_000)]
    open_files: dict[Path, object] = {}

    def by_torchcodec(path: Path, index: int) -> object:
        from torchcodec.decoders import VideoDecoder

        if path not in open_files:
            open_files[path] = VideoDecoder(path, dimension_order="NHWC", num_ffmpeg_threads=1)
        return open_files[path][index]  # type: ignore[index]

    def by_pyav(path: Path, index: int) -> object:
        import av

        if path not in open_files:
            container = av.open(str(path))
            container.streams.video[0].codec_context.thread_count = 1
            open_files[path] = container
        container = open_files[path]
        stream = container.streams.video[0]  # type: ignore[attr-defined]
        target = index / float(stream.average_rate)
        container.seek(int(target / stream.time_base), stream=stream)  # type: ignore[attr-defined]
        for frame in container.decode(stream):  # type: ignore[attr-defined]
            if frame.time is not None and frame.time >= target - 1e-4:
                return torch.from_numpy(frame.to_ndarray(format="rgb24"))
        return torch.from_numpy(np.zeros((1, 1, 3), np.uint8))

    read = by_torchcodec if kind == "torchcodec" else by_pyav

    class Frames(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(order)

        def __getitem__(self, i: int) -> list[object]:
            paths, index = order[i]
            return [read(path, index) for path in paths]

    loader = torch.utils.data.DataLoader(Frames(), batch, num_workers=workers)
    return lambda: iter(loader)


def main() -> None:
    """Measure one loader."""
    parse = argparse.ArgumentParser()
    parse.add_argument("kind")
    parse.add_argument("root", type=Path)
    parse.add_argument("--batch", type=int, default=16)
    parse.add_argument("--workers", type=int, default=2)
    parse.add_argument("--batches", type=int, default=40)
    a = parse.parse_args()
    fps = json.loads((a.root / "meta" / "info.json").read_text())["fps"]
    if a.kind.startswith("lerobot-"):
        make = lerobot(a.root, a.kind.removeprefix("lerobot-"), batch=a.batch, workers=a.workers)
    elif a.kind == "spdl":
        make = spdl(a.root, batch=a.batch, workers=a.workers, fps=fps)
    else:
        make = frames_by_process(a.root, a.kind, batch=a.batch, workers=a.workers)
    print(json.dumps({"ready": a.kind}), flush=True)
    # One repetition per line on standard input, so that loaders can be measured in turns.
    for _ in sys.stdin:
        print(json.dumps({"rate": rate(make, batch=a.batch, batches=a.batches)}), flush=True)


if __name__ == "__main__":
    main()
