"""The loader under Lightning: no sampler is injected, ranks come from the trainer, the position is in the
checkpoint.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import lightning
import torch
from loongforge_data import ADFEDataLoader, open_dataset
from loongforge_data.synthetic import write_dataset


class RobotData(lightning.LightningDataModule):
    """Hands the loader to the trainer and keeps its position in checkpoints."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root
        self.loader: ADFEDataLoader | None = None

    def train_dataloader(self) -> ADFEDataLoader:
        """Return the loader of this rank."""
        rank, world = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        dataset = open_dataset(self.root, window={"action": range(8)}, image_size=(32, 32))
        self.loader = ADFEDataLoader(
            dataset, 8, 2, shuffle=True, rank=rank, world_size=world, persistent_workers=True
        )
        return self.loader

    def state_dict(self) -> dict[str, object]:
        """Return the position for the checkpoint."""
        return {} if self.loader is None else {"loader": self.loader.state_dict()}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Go to the position of a checkpoint."""
        if self.loader is not None and "loader" in state:
            self.loader.load_state_dict(state["loader"])


class Policy(lightning.LightningModule):
    """A linear policy."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(32 * 32 * 3, 24)

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        """Return the loss of a batch."""
        camera = next(key for key in batch if key.startswith("observation.images"))
        prediction = self.layer(batch[camera].flatten(1).float() / 255)
        return torch.nn.functional.mse_loss(prediction, batch["action"].flatten(1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(root: Path) -> None:
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="auto",
        devices=1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    data = RobotData(root)
    trainer.fit(Policy(), datamodule=data)
    print(
        f"trained {trainer.global_step} steps; waited {data.loader.stats()['data_wait_ms']:.0f} ms for data"
    )
    data.loader.close()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            write_dataset(
                Path(folder) / "set", episodes=2, frames=24, cameras=1, size=(96, 128), codec="h264", gop=8
            )
            main(Path(folder) / "set")
