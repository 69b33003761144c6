"""The original public API: every import and every setting, on a small model, on the CPU.

Run it with ``python examples/public_api.py [FOLDER]``; it trains for two epochs and prints what was used.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from loongforge import build_mdg, enable_loongforge
from loongforge.data import ADFEDataLoader, DynamicPadCollator
from loongforge.mla import get_mla_stats
from loongforge.trainer import LoongTrainer
from torch import Tensor, nn

MDG_CONFIG = """\
groups:
  - name: high
    match: ["vision.*"]
    strategy: ring
  - name: low
    match: ["head.*"]
    strategy: direct
"""


class Frames:
    """Pictures of two resolutions with the action that fits them."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        height = 16 if index % 2 else 24
        return {
            "image": torch.rand(height, 24, 3, generator=generator),
            "action": torch.rand(4, generator=generator),
        }


@enable_loongforge(
    gcts=True,
    mla=True,
    adfe=True,
    dmf=True,
    gcts_comm_strategy="hybrid",
    gcts_rebuild_interval=5000,
    mla_global_pool_gb=None,
    adfe_prefetch_factor=2,
    dmf_fusion_batch_size=2,
)
class Policy(nn.Module):
    """Mean colour of the valid pixels to action."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.Sequential(nn.Linear(3, 16), nn.GELU())
        self.head = nn.Linear(16, 4)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the loss as mean and as sum and count per sample."""
        mask = batch["image_mask"][..., None].float()
        pooled = (self.vision(batch["image"]) * mask).sum(dim=(1, 2)) / mask.sum(dim=(1, 2))
        error = (self.head(pooled) - batch["action"]).square()
        count = torch.full((len(error),), error.shape[1], device=error.device)
        return {"loss": error.mean(), "loss_sum": error.sum(dim=1), "loss_count": count}


def main(folder: Path) -> dict[str, object]:
    """Use the whole public API once and return what it showed."""
    config = folder / "mdg.yaml"
    config.write_text(MDG_CONFIG)
    model = enable_loongforge(mdg_config=config, dmf_fusion_batch_size=2)(Policy())
    loader = ADFEDataLoader(
        Frames(),
        batch_size=4,
        num_workers=2,
        pin_memory=torch.cuda.is_available(),
        collate_fn=DynamicPadCollator(max_ratio=2.0),
        prefetch_factor=2,
        persistent_workers=True,
    )
    graph = build_mdg(model, (next(iter(loader)),))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainer = LoongTrainer(
        model=model,
        train_dataloader=loader,
        optimizer=optimizer,
        lr_scheduler=torch.optim.lr_scheduler.StepLR(optimizer, step_size=100),
        gradient_accumulation_steps=4,
        mixed_precision="no",
        checkpoint_dir=str(folder / "run"),
        log_interval=1,
    )
    result = trainer.train(num_epochs=2)
    stats = get_mla_stats()
    return {
        "modules": len(graph.nodes),
        "steps": result.steps,
        "checkpoint": result.checkpoint,
        "global_pool_used_gb": stats["global_pool_used_gb"],
        "freelist_fragmentation": stats["freelist_fragmentation"],
    }


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp(prefix="loongforge_"))
    target.mkdir(parents=True, exist_ok=True)
    for name, value in main(target).items():
        print(f"{name}: {value}")
