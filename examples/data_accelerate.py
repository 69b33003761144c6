"""The loader under Accelerate: it shards and pads by itself, so only model and optimizer are prepared."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from loongforge_data import ADFEDataLoader, open_dataset
from loongforge_data.device import DevicePrefetcher
from loongforge_data.synthetic import write_dataset


def main(root: Path) -> None:
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    dataset = open_dataset(root, window={"action": range(8)}, image_size=(32, 32))
    loader = ADFEDataLoader(
        dataset,
        8,
        2,
        shuffle=True,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        persistent_workers=True,
    )
    model = torch.nn.Linear(32 * 32 * 3, 24)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    camera = dataset.cameras[0]
    # Not accelerator.register_for_checkpointing alone: the position counts what was handed out.
    batches = DevicePrefetcher(loader, accelerator.device)
    for epoch in range(2):
        batches.set_epoch(epoch)
        for batch in batches:
            prediction = model(batch[camera].flatten(1).float() / 255)
            loss = torch.nn.functional.mse_loss(prediction, batch["action"].flatten(1))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print(f"loss {loss.item():.4f}; waited {batches.stats()['data_wait_ms']:.0f} ms for data")
    loader.close()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            write_dataset(
                Path(folder) / "set", episodes=2, frames=24, cameras=1, size=(96, 128), codec="h264", gop=8
            )
            main(Path(folder) / "set")
