"""A plain PyTorch loop on robot video: exact order, resume in the middle of an epoch, and what loading
cost.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from loongforge_data import ADFEDataLoader, open_dataset
from loongforge_data.device import DevicePrefetcher, images_to_half
from loongforge_data.synthetic import write_dataset


def make_loader(root: Path) -> ADFEDataLoader:
    dataset = open_dataset(root, window={"action": range(8)}, image_size=(64, 64))
    return ADFEDataLoader(dataset, batch_size=8, num_workers=2, shuffle=True, seed=0, persistent_workers=True)


def main(root: Path) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with make_loader(root) as loader:
        camera = loader.dataset.cameras[0]
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(24)).to(device)
        batches = DevicePrefetcher(loader, device, lambda x: images_to_half(x, dtype=torch.float32))
        saved = None
        for step, batch in enumerate(batches):
            prediction = model(batch[camera]).view(batch["action"].shape)
            loss = torch.nn.functional.mse_loss(prediction, batch["action"])
            loss.backward()
            model.zero_grad()
            if step == 2:
                saved, rest = batches.state_dict(), []
            elif step > 2:
                rest.append(batch["index"].tolist())
        stats = loader.stats()
    with make_loader(root) as resumed:
        resumed.load_state_dict(saved)
        assert [batch["index"].tolist() for batch in resumed] == rest
    print(f"loss {loss.item():.4f}, waited {stats['data_wait_ms']:.0f} ms for {stats['batches']} batches")
    print(f"resumed after batch 3: the same {len(rest)} batches followed")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            write_dataset(
                Path(folder) / "set", episodes=3, frames=24, cameras=1, size=(96, 128), codec="h264", gop=8
            )
            main(Path(folder) / "set")
