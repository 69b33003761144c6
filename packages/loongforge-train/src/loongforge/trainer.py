"""``LoongTrainer``: trains any module that returns a loss with any loader, with the pillars switched on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR, LRScheduler

from loongforge.batches import LossAdapter
from loongforge.config import CheckpointConfig, GuardConfig, PillarConfig, TrainConfig
from loongforge.enable import settings_of
from loongforge.errors import ConfigError
from loongforge.fusing import plan_ahead
from loongforge.ranks import Ranks, join
from loongforge.records import StepRecord
from loongforge.rng import seed_rank
from loongforge.session import Result, Session, build_parts
from loongforge.sources import BatchSource
from loongforge.staging import stage

PRECISIONS = {"no": "fp32", "fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}


class LoongTrainer:
    """Trains a model.

    Args:
        model: Module that returns a loss: a scalar tensor, a mapping or object with ``loss``, or a tuple that
            starts with it. Called as ``model(batch)``, ``model(**batch)`` or ``model(*batch)``.
        train_dataloader: Yields micro-batches of this rank, once per iteration.
        optimizer: Over the model's parameters; AdamW with default settings when None.
        lr_scheduler: Advanced once per optimizer step; constant when None.
        gradient_accumulation_steps: Micro-batches per optimizer step; an epoch's last window may have fewer.
        mixed_precision: ``no``, ``bf16`` or ``fp16`` (with a gradient scaler).
        checkpoint_dir: Run directory: records, checkpoints, control socket.
        log_interval: Steps between two lines on the terminal.
        resume: ``auto`` = newest complete checkpoint of ``checkpoint_dir`` if any, ``never``, or a directory.
        earlier_run: What happens to files of an earlier run in ``checkpoint_dir`` that this one does not go
            on from: ``refuse`` or ``move`` (into ``earlier-N``).
        seed: Seed of this rank's random draws.
        max_grad_norm: Clip the global gradient norm; None does not clip.
        callbacks: Called with each :class:`StepRecord`, in order.
        pillars: Pillar settings; by default those of :func:`loongforge.enable_loongforge` on the model's
            class.
        checkpoint: Checkpoint settings.
        guards: Guard settings.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        strategy: ``ddp``, ``zero1``, ``fsdp2`` or ``hsdp``.

    Raises:
        ConfigError: A setting is wrong; for example a fusion batch size that does not divide the
            accumulation.
    """

    def __init__(
        self,
        model: nn.Module,
        train_dataloader: Iterable[object],
        optimizer: Optimizer | None = None,
        lr_scheduler: LRScheduler | None = None,
        gradient_accumulation_steps: int = 1,
        mixed_precision: str = "no",
        checkpoint_dir: str = "checkpoints",
        log_interval: int = 10,
        *,
        resume: str = "auto",
        earlier_run: str = "refuse",
        seed: int = 0,
        max_grad_norm: float | None = None,
        callbacks: Sequence[Callable[[StepRecord], object]] = (),
        pillars: PillarConfig | None = None,
        checkpoint: CheckpointConfig | None = None,
        guards: GuardConfig | None = None,
        device: str = "auto",
        strategy: str = "ddp",
    ) -> None:
        if mixed_precision not in PRECISIONS:
            msg = f"mixed_precision is {mixed_precision!r}: allowed are {', '.join(PRECISIONS)}"
            raise ConfigError(msg)
        if strategy not in {"ddp", "zero1", "fsdp2", "hsdp"}:
            msg = f"strategy is {strategy!r}: allowed are ddp, zero1, fsdp2, hsdp"
            raise ConfigError(msg)
        self.model = model
        self.loader = train_dataloader
        self._optimizer = optimizer
        self._scheduler = lr_scheduler
        self._callbacks = tuple(callbacks)
        self._settings: dict[str, object] = {
            "output": checkpoint_dir,
            "accumulation": gradient_accumulation_steps,
            "precision": PRECISIONS[mixed_precision],
            "log_interval": log_interval,
            "resume": resume,
            "earlier_run": earlier_run,
            "seed": seed,
            "clip_norm": max_grad_norm,
            "device": device,
            "strategy": strategy,
            "pillars": pillars or settings_of(model) or PillarConfig(),
            "checkpoint": checkpoint or CheckpointConfig(),
            "guards": guards or GuardConfig(),
        }
        self._config(1)
        self.session: Session | None = None

    def _config(self, epochs: int, steps: int | None = None) -> TrainConfig:
        return TrainConfig(epochs=epochs, steps=steps, schedule="constant", **self._settings)  # type: ignore[arg-type]

    def train(self, num_epochs: int = 1, *, max_steps: int | None = None) -> Result:
        """Train up to ``num_epochs`` passes over the data in all, resuming where the run directory says.

        Args:
            num_epochs: Passes over the data, counted from the start of the run.
            max_steps: Stop earlier, after this optimizer step of the run.

        Returns:
            Steps done, exit code, and the paths of records and newest checkpoint.
        """
        config = self._config(num_epochs, max_steps)
        ranks = join(config.device)
        try:
            self.session = self._build(config, ranks)
            return self.session.train()
        finally:
            ranks.close()

    def _build(self, config: TrainConfig, ranks: Ranks) -> Session:
        self.model.to(ranks.device)
        seed_rank(config.seed, ranks.rank)
        optimizer, schedule = self._optimizer, self._scheduler
        if optimizer is not None and config.strategy in {"zero1", "fsdp2", "hsdp"} and ranks.world_size > 1:
            msg = f"strategy {config.strategy} builds the optimizer over its shards: pass optimizer=None"
            raise ConfigError(msg)
        if schedule is not None and optimizer is None:
            msg = "lr_scheduler is given without its optimizer: pass optimizer as well"
            raise ConfigError(msg)
        if optimizer is not None and schedule is None:
            schedule = ConstantLR(optimizer, factor=1.0, total_iters=0)
        fingerprint = getattr(getattr(self.loader, "dataset", None), "fingerprint", None)
        loader = self.loader
        if config.pillars.data == "on":
            depth, plan = config.pillars.device_prefetch, plan_ahead(config, self.model, ranks)
            loader = stage(loader, self.model, ranks.device, seed=config.seed, depth=depth, plan=plan)
        parts = build_parts(
            config,
            self.model,
            BatchSource(loader, fingerprint=fingerprint if isinstance(fingerprint, str) else None),
            ranks,
            module=LossAdapter(self.model),
            optimizer=optimizer,
            schedule=schedule,
        )
        return Session(config, parts, callbacks=self._callbacks)
