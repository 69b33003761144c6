"""Decoding on a GPU is taken only where it gives the CPU's frames; here with stand-ins for the device."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from loongforge_data.dataset import open_dataset
from loongforge_data.errors import VideoError
from loongforge_data.loader import ADFEDataLoader
from loongforge_data.synthetic import write_dataset
from loongforge_data.video import VideoFile, hardware, reader
from loongforge_data.video.hardware import Refusal
from loongforge_data.video.probe import open_container

CLIPS = {
    "h264": ("libx264", {"bf": "3", "x264-params": "keyint=12:open-gop=1:scenecut=0"}, ".mp4"),
    "hevc": ("libx265", {"x265-params": "keyint=8:bframes=3:log-level=error:pools=1"}, ".mp4"),
    "av1": ("libsvtav1", {"preset": "12", "svtav1-params": "keyint=8:lp=1"}, ".mp4"),
}


@pytest.fixture
def device(monkeypatch):
    """A device that decodes like the CPU but, as a download does, loses the marks of packets."""
    monkeypatch.setattr(reader, "open_on_gpu", open_container)
    monkeypatch.setattr(hardware, "probe", lambda: None)


@pytest.fixture(autouse=True)
def fresh_probe():
    hardware.probe.cache_clear()
    yield
    getattr(hardware.probe, "cache_clear", lambda: None)()


@pytest.mark.parametrize("name", CLIPS)
def test_frames_without_marks_are_told_apart_by_their_stamps(tmp_path, clips, device, name):
    codec, options, suffix = CLIPS[name]
    path = clips.write(tmp_path / f"clip{suffix}", codec=codec, options=options, frames=40)
    expected = clips.sequential(path)
    with VideoFile(path, gpu=True) as video:
        assert (video.on_gpu, video.refusal) == (True, None)
        order = [*range(39, -1, -1), *random.Random(1).choices(range(40), k=60), *range(40)]
        assert not [i for i in order if clips.digest(video.frame(i)) != expected[i][1]]


def test_a_device_whose_first_frame_differs_is_not_used(tmp_path, clips, monkeypatch):
    path = clips.write(tmp_path / "clip.mp4", frames=20)
    other = clips.write(
        tmp_path / "other.mp4", frames=20, pictures=[clips.picture(n + 300) for n in range(20)]
    )
    monkeypatch.setattr(reader, "open_on_gpu", lambda _: open_container(str(other)))
    with VideoFile(path, gpu=True) as video:
        assert (video.on_gpu, video.refusal) == (False, Refusal.DIFFERS)
        assert [clips.number(f.to_ndarray(format="rgb24")) for _, f in video.decode(range(20))] == [
            *range(20)
        ]


def test_a_file_the_device_does_not_take_is_decoded_on_the_cpu(tmp_path, clips, monkeypatch):
    def refuse(path):
        msg = "no"
        raise VideoError(msg, path=path)

    path = clips.write(tmp_path / "clip.mp4", frames=20)
    monkeypatch.setattr(reader, "open_on_gpu", refuse)
    with VideoFile(path, gpu=True) as video:
        assert (video.on_gpu, video.refusal) == (False, Refusal.CODEC)
        assert [clips.number(f.to_ndarray(format="rgb24")) for _, f in video.decode(range(20))] == [
            *range(20)
        ]


def test_frames_without_stamps_stay_on_the_cpu(tmp_path, clips, device):
    path = clips.write(tmp_path / "clip.h264", frames=20)
    with VideoFile(path, gpu=True) as video:
        assert (video.on_gpu, video.refusal) == (False, Refusal.STAMPS)
        assert len(list(video.decode(range(20)))) == 20


@pytest.mark.parametrize("missing", ["build", "device", "driver"])
def test_a_host_without_a_usable_gpu_is_named_for_what_it_lacks(monkeypatch, missing):
    devices = [] if missing == "build" else ["cuda"]
    monkeypatch.setattr("av.codec.hwaccel.hwdevices_available", lambda: devices)
    monkeypatch.setattr(Path, "glob", lambda *_: iter([] if missing == "device" else [Path("/dev/nvidia0")]))

    def load(name):
        raise OSError(name)

    monkeypatch.setattr(hardware.ctypes, "CDLL", load)
    assert hardware.probe() is Refusal[missing.upper()]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    path = tmp_path_factory.mktemp("gpu") / "set"
    write_dataset(path, episodes=2, frames=12, cameras=1, size=(32, 48), codec="h264", gop=4, version="3.0")
    return path


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("decode", ["auto", "cuda"])
def test_a_loader_falls_back_with_a_reason_and_the_same_pictures(root, monkeypatch, decode, workers):
    monkeypatch.setattr(hardware, "probe", lambda: Refusal.DEVICE)
    dataset = open_dataset(root)
    camera = dataset.cameras[0]
    with ADFEDataLoader(dataset, 5, workers, decode=decode, persistent_workers=True) as loader:
        for batch in loader:
            for row, index in enumerate(batch["index"]):
                np.testing.assert_array_equal(np.asarray(batch[camera][row]), dataset[int(index)][camera])
        stats = loader.stats()
        assert (stats["decode"], stats["decode_reason"]) == ("cpu", str(Refusal.DEVICE))
        assert (stats["gpu_frames"], stats["gpu_refused_frames"]) == (0, 0)


def test_a_loader_counts_what_the_device_decodes_and_what_it_refuses(root, device, monkeypatch):
    dataset = open_dataset(root)
    camera = dataset.cameras[0]
    with ADFEDataLoader(dataset, 5, decode="cuda", persistent_workers=True) as loader:
        for batch in loader:
            for row, index in enumerate(batch["index"]):
                np.testing.assert_array_equal(np.asarray(batch[camera][row]), dataset[int(index)][camera])
        stats = loader.stats()
        assert (stats["decode"], stats["decode_reason"]) == ("cuda", None)
        assert (stats["gpu_frames"], stats["gpu_refused_frames"]) == (24, 0)
    monkeypatch.setattr(hardware, "TOLERANCE", -1)
    monkeypatch.setattr("loongforge_data.video.file.TOLERANCE", -1)
    with ADFEDataLoader(dataset, 5, decode="auto", persistent_workers=True) as loader:
        list(loader)
        assert loader.stats()["gpu_refused_frames"] == 24
    with ADFEDataLoader([{"a": 1}] * 4, 2, decode="cuda", persistent_workers=True) as loader:
        list(loader)
        assert loader.stats()["decode_reason"] == str(Refusal.NO_VIDEO)
