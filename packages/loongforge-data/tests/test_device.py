"""Device prefetch: positions count what was handed out; conversion; and, with a GPU, that no batch is
overwritten."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from loongforge_data.loader import ADFEDataLoader
from loongforge_data.testing import ToyDataset, indices_of

torch = pytest.importorskip("torch")
device = pytest.importorskip("loongforge_data.device")


class Pictures:
    """Pictures that are one value all over: a torn or overwritten batch shows."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, object]:
        return {
            "index": index,
            "image": np.full((32, 48, 3), index % 251, np.uint8),
            "mask": np.ones(4, np.uint8),
        }


def test_batches_arrive_in_order_and_images_are_converted():
    loader = ADFEDataLoader(Pictures(10), 4)
    batches = list(device.DevicePrefetcher(loader, "cpu", device.images_to_half))
    assert indices_of(batches) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert batches[0]["image"].shape == (4, 3, 32, 48)
    assert batches[0]["image"].dtype == torch.bfloat16
    assert batches[0]["mask"].dtype == torch.uint8
    want = (torch.tensor([4.0, 5, 6, 7]) / 255 - 0.5) / 0.5
    torch.testing.assert_close(batches[1]["image"][:, 0, 0, 0].float(), want, atol=4e-3, rtol=0)


def test_images_to_half_refuses_other_layouts():
    with pytest.raises(ValueError, match="uint8"):
        device.images_to_half(torch.zeros(3, 4, 4))


def test_state_counts_what_was_handed_out():
    prefetcher = device.DevicePrefetcher(ADFEDataLoader(ToyDataset(11), 2, shuffle=True), "cpu", depth=3)
    whole = indices_of(device.DevicePrefetcher(ADFEDataLoader(ToyDataset(11), 2, shuffle=True), "cpu"))
    iterator = iter(prefetcher)
    for number in range(len(whole)):
        assert indices_of([next(iterator)]) == [whole[number]]
        again = device.DevicePrefetcher(ADFEDataLoader(ToyDataset(11), 2, shuffle=True), "cpu")
        again.load_state_dict(prefetcher.state_dict())
        again.set_epoch(0)
        assert indices_of(again) == whole[number + 1 :]
    assert list(iterator) == []
    assert (prefetcher.epoch, prefetcher.batch) == (1, 0)
    assert len(prefetcher) == 6


class Ahead(device.DevicePrefetcher):
    """Pulls ahead as on a GPU, without one."""

    def __init__(self, loader, depth):
        super().__init__(loader, "cpu", depth=depth)
        self.device = torch.device("cuda")

    def _pull(self, source):
        self.device = torch.device("cpu")
        try:
            return super()._pull(source)
        finally:
            self.device = torch.device("cuda")


class Broken(ToyDataset):
    def __getitem__(self, index):
        if index == 5:
            message = "sample 5 is damaged"
            raise RuntimeError(message)
        return super().__getitem__(index)


@pytest.mark.parametrize("depth", [1, 2, 3, 9])
def test_an_error_comes_after_the_batches_before_it_and_the_position_misses_none(depth):
    prefetcher = Ahead(ADFEDataLoader(Broken(11), 2), depth)
    seen = []

    def take():
        for batch in prefetcher:
            seen.extend(indices_of([batch]))

    with pytest.raises(Exception, match="sample 5 is damaged"):
        take()
    assert seen == [[0, 1], [2, 3]]
    again = device.DevicePrefetcher(ADFEDataLoader(ToyDataset(11), 2), "cpu")
    again.load_state_dict(prefetcher.state_dict())
    again.set_epoch(0)
    assert indices_of(again)[0] == [4, 5]


class Slow:
    """An event of a copy that takes until somebody waits for it."""

    def __init__(self):
        self.waited = False

    def query(self):
        return self.waited

    def synchronize(self):
        self.waited = True


class Copying(Ahead):
    """Copies that are not done when their batch is handed out."""

    def __init__(self, loader, depth):
        super().__init__(loader, depth)
        self.events = []

    def _pull(self, source):
        staged = super()._pull(source)
        if staged is None:
            return None
        self.events.append(Slow())
        return dataclasses.replace(staged, ready=self.events[-1], began=Slow())

    def _hand_out(self, entry):
        return entry.value


@pytest.mark.parametrize("stop", [None, 2])
def test_memory_of_batches_is_not_given_back_before_their_copies_are_done(stop):
    prefetcher = Copying(ADFEDataLoader(ToyDataset(8), 2), 2)
    iterator = iter(prefetcher)
    taken = [next(iterator) for _ in range(stop or 4)]
    assert not any(event.waited for event in prefetcher.events)
    if stop is None:
        assert list(iterator) == []
    else:
        iterator.close()
    assert all(event.waited for event in prefetcher.events[: len(taken)])


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="depth"):
        device.DevicePrefetcher([], "cpu", depth=0)
    with pytest.raises(TypeError, match="state_dict"):
        device.DevicePrefetcher([], "cpu").state_dict()
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no CUDA"):
            device.DevicePrefetcher([], "cuda")


def test_pin_memory_without_a_device_says_why():
    if torch.cuda.is_available():
        pytest.skip("a device is there")
    with ADFEDataLoader(ToyDataset(8), 4, 1, pin_memory=True, persistent_workers=True) as loader:
        assert indices_of(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert "no CUDA" in str(loader.stats()["pin_reason"])


gpu = pytest.mark.gpu
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@gpu
@needs_cuda
@pytest.mark.parametrize("pin", [False, True])
def test_no_batch_is_overwritten_while_kernels_read_it(pin):
    """The known race: memory of a side-stream copy reused while the consumer's kernels are still queued."""
    loader = ADFEDataLoader(Pictures(512), 8, 2, pin_memory=pin, persistent_workers=True)
    prefetcher = device.DevicePrefetcher(loader, "cuda", device.images_to_half, depth=3)
    burden = torch.randn(2048, 2048, device="cuda")
    results = []
    for _ in range(2):
        for batch in prefetcher:
            for _ in range(4):
                burden = burden @ burden / 2048  # keeps the consumer's stream behind
            results.append(
                (
                    batch["index"],
                    batch["image"].float().amin((1, 2, 3)),
                    batch["image"].float().amax((1, 2, 3)),
                )
            )
    torch.cuda.synchronize()
    for index, low, high in results:
        want = (index.float() % 251 / 255 - 0.5) / 0.5
        torch.testing.assert_close(low, high)
        torch.testing.assert_close(low, want, atol=8e-3, rtol=0)
    if pin:
        assert loader.stats()["pinned_bytes"] > 0
    loader.close()


@gpu
@needs_cuda
def test_plain_loop_with_registered_slots_and_asynchronous_copies_is_safe():
    with ADFEDataLoader(Pictures(512), 8, 2, pin_memory=True, persistent_workers=True) as loader:
        copies = []
        for batch in loader:
            assert batch["image"].is_pinned()
            copies.append((batch["index"].clone(), batch["image"].to("cuda", non_blocking=True)))
        torch.cuda.synchronize()
        for index, image in copies:
            assert (image.amin((1, 2, 3)).cpu() == index % 251).all()
            assert (image.amax((1, 2, 3)).cpu() == index % 251).all()
