"""Configuration of a training run: frozen dataclasses, read from TOML or YAML, overridden by flags.

Every field has a unit and a default. ``TrainConfig`` is what ``loongforge train --print-config`` prints and
what each checkpoint carries.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar, get_type_hints

from loongforge.conversion import convert
from loongforge.errors import ConfigError

_T = TypeVar("_T")
Precision = Literal["fp32", "bf16", "fp16"]
Strategy = Literal["ddp", "zero1", "fsdp2", "hsdp"]
SHARDED = frozenset({"fsdp2", "hsdp"})
"""Strategies that split weights over ranks."""


@dataclass(frozen=True, kw_only=True)
class PillarConfig:
    """Which pillars run. Each has an ``off`` that restores stock PyTorch."""

    mem: Literal["off", "auto", "advisor", "pool", "global"] = "off"
    """Memory pillar: off; auto = pool on a GPU, else off; advisor = statistics only; pool = weights and
    optimizer state in a pool of their own; global = every device tensor is placed by us."""
    mem_pool_gb: float | None = None
    """Size of the memory pool in GB; None lets the pillar choose."""
    comm: Literal["off", "hybrid", "simple"] = "hybrid"
    """Gradient scheduler: off = stock DistributedDataParallel. Inactive on one rank."""
    comm_rebuild_interval: int = 5000
    """Steps between two rebuilds of the communication plan."""
    comm_groups: Mapping[str, object] = field(default_factory=dict)
    """Overrides of communication groups by parameter name (``mdg_config``)."""
    data: Literal["on", "off"] = "on"
    """ADFEDataLoader, or torch's DataLoader when off."""
    prefetch_factor: int = 2
    """Batches loaded ahead per loader worker."""
    device_prefetch: int = 2
    """Micro-batches copied to the GPU ahead of their step on a stream of their own; 0 copies at the step.
    Works with ADFEDataLoader and a CUDA device."""
    fuse: int | Literal["off", "auto"] = "off"
    """Micro-batches per fused forward/backward: a divisor of the accumulation, auto, or off."""
    graph: bool = False
    """CUDA graph replay of forward and backward (CUDA only)."""
    fill_windows: bool = True
    """With graphs: fill an epoch's last, shorter window with samples without weight, so that it replays
    too."""
    frozen_ahead: bool = True
    """With graphs: the frozen part of the next window's forward runs beside the present step, on a stream of
    its own. Works with device_prefetch and a model that says which part is frozen."""
    late_weight_gradients: bool = True
    """With graphs: fused linear layers compute their weights' gradients on a stream of their own, beside the
    chain of input gradients."""
    fused_ops: bool = False
    """Replace chosen modules by fused kernels."""
    fused_optimizer: bool = False
    """AdamW that clips, checks and updates in one pass over gradients and moments. Every rank must hold whole
    weights and moments (one rank, or strategy ddp); elsewhere torch's AdamW runs, and the log says why."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When and how checkpoints are written."""

    every: int = 500
    """Optimizer steps between two checkpoints; 0 writes only the last one."""
    keep_last: int = 3
    """Newest complete checkpoints that are kept (at least 1)."""
    keep_best: int = 0
    """Additional checkpoints kept for their low mean loss."""
    background: bool = True
    """Write in a thread from a host copy (at most one copy alive)."""
    model_format: Literal["pt", "safetensors", "both"] = "pt"
    """File format of the weights: model.pt, model.safetensors, or both."""
    layout: Literal["whole", "sharded"] = "whole"
    """whole = gathered into plain files on rank 0; sharded = every rank (fsdp2, hsdp) writes its own part."""
    timeout_s: float = 600.0
    """Longest wait for the files of the other ranks, in seconds."""
    failures_allowed: int = 2
    """Failed periodic writes in a row that are only logged; the last checkpoint of a run always counts."""
    verify: bool = True
    """Check CRC-32 of every file when resuming."""


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """What happens when a run goes wrong."""

    nonfinite: Literal["skip", "stop", "off"] = "skip"
    """NaN or infinity in loss or gradient: skip the update on all ranks, stop at once, or do not look."""
    max_skips: int = 10
    """Skipped steps in a row after which the run stops."""
    spike_factor: float | None = None
    """A loss above this multiple of the running median is a spike; None is off."""
    spike_action: Literal["warn", "skip", "stop"] = "warn"
    """What a spike does."""
    hang_timeout_s: float = 1800.0
    """Seconds without a finished step after which the stacks of all threads are dumped; 0 is off."""
    hang_action: Literal["dump", "abort"] = "dump"
    """After the dump: go on waiting, or end the process with exit code 75."""


@dataclass(frozen=True, kw_only=True)
class ElasticConfig:
    """Ranks that come and go while a run goes on."""

    enabled: bool = False
    """A rank that does not answer is taken out and the others go on; ``loongforge hot-rejoin`` lets one in.
    Needs strategy ddp, loongforge-comm and loongforge-data. On a GPU the host then waits for each step's
    gradients before the optimizer."""
    check_every: int = 100
    """Steps between two looks at who wants to join."""
    heartbeat_s: float = 10.0
    """Seconds without a heartbeat after which a rank is taken out."""
    min_ranks: int = 1
    """Fewest ranks that go on; with fewer the run ends and resumes from its newest checkpoint."""
    store: str = ""
    """HOST:PORT of a store of its own (``python -m loongforge_comm store``); by default torchrun's, which is
    lost with the first node."""

    @property
    def heartbeat_interval_s(self) -> float:
        """Seconds between two heartbeats."""
        return min(1.0, self.heartbeat_s / 4)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run."""

    dataset: str | None = None
    """LeRobot data set directory."""
    recipe: str = "gr00t_n1_6_tiny"
    """Name of the recipe that builds model, data set and collate function."""
    recipe_options: Mapping[str, object] = field(default_factory=dict)
    """Options handed to the recipe."""
    output: str = "runs/default"
    """Run directory: metrics.jsonl, checkpoints, control sockets, stacks."""
    steps: int | None = None
    """Optimizer steps in all; None means: by epochs."""
    epochs: int | None = None
    """Passes over the data; None means: by steps."""
    batch_size: int = 8
    """Samples per micro-batch and rank."""
    accumulation: int = 1
    """Micro-batches per optimizer step."""
    precision: Precision = "fp32"
    """Autocast type of forward and backward."""
    seed: int = 0
    """Seed of weights, data order and random draws."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N (under torchrun: cuda means the local rank's)."""
    strategy: Strategy = "ddp"
    """Parallel strategy across ranks."""
    hsdp_shards: int = 0
    """Ranks that share one copy of the weights under hsdp; 0 = ranks of one host."""
    learning_rate: float = 1e-4
    """Peak learning rate."""
    weight_decay: float = 1e-5
    """AdamW weight decay."""
    beta1: float = 0.95
    """AdamW first momentum."""
    beta2: float = 0.999
    """AdamW second momentum."""
    eps: float = 1e-8
    """AdamW epsilon."""
    warmup_ratio: float = 0.05
    """Share of all steps with a rising learning rate."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the learning rate after the warm-up."""
    clip_norm: float | None = 1.0
    """Largest global gradient norm; None does not clip."""
    ema_decay: float | None = None
    """Decay of the exponential moving average of the weights; None keeps none."""
    workers: int = 2
    """Loader workers per rank."""
    shuffle: bool = True
    """Shuffle the samples each epoch."""
    drop_ragged: bool = False
    """Drop an epoch's last window when it has fewer micro-batches than the accumulation."""
    compile: bool = False
    """torch.compile the model."""
    resume: str = "auto"
    """auto = newest complete checkpoint of the run directory, if any; never; or a checkpoint directory."""
    earlier_run: Literal["refuse", "move"] = "refuse"
    """What happens to files of an earlier run in the run directory that this one does not go on from: refuse
    to start, or move them into earlier-N."""
    allow_mismatch: bool = False
    """Resume although data set or number of ranks changed; the data position starts a fresh epoch."""
    log_interval: int = 1
    """Steps between two lines on the terminal (the step record is always written)."""
    sinks: tuple[str, ...] = ()
    """Further sinks: tensorboard, wandb, prometheus."""
    control: bool = True
    """Open the control socket."""
    validate_every: int = 0
    """Steps between two measurements on the recipe's held-out episodes (option held_out); 0 is off."""
    probe_interval: int = 1000
    """Steps between two probes that count operators and host syncs (the first is step 6); 0 is off."""
    pillars: PillarConfig = field(default_factory=PillarConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    guards: GuardConfig = field(default_factory=GuardConfig)
    elastic: ElasticConfig = field(default_factory=ElasticConfig)

    def __post_init__(self) -> None:
        _positive("steps", self.steps, optional=True)
        _positive("epochs", self.epochs, optional=True)
        _positive("batch_size", self.batch_size)
        _positive("accumulation", self.accumulation)
        _positive("log_interval", self.log_interval)
        if self.steps is None and self.epochs is None:
            msg = "neither steps nor epochs is set: allowed is at least one; pass --steps N or --epochs N"
            raise ConfigError(msg)
        if self.learning_rate < 0:
            msg = f"learning_rate is {self.learning_rate}: allowed is 0 or more"
            raise ConfigError(msg)
        if self.workers < 0:
            msg = f"workers is {self.workers}: allowed is 0 (no worker) or more"
            raise ConfigError(msg)
        if self.clip_norm is not None and self.clip_norm <= 0:
            msg = f"clip_norm is {self.clip_norm}: allowed is a positive number or none (no clipping)"
            raise ConfigError(msg)
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            msg = f"ema_decay is {self.ema_decay}: allowed is a number between 0 and 1, or none"
            raise ConfigError(msg)
        if not 0 <= self.warmup_ratio <= 1:
            msg = f"warmup_ratio is {self.warmup_ratio}: allowed is 0 to 1, a share of all steps"
            raise ConfigError(msg)
        if self.checkpoint.keep_last < 1:
            keep = self.checkpoint.keep_last
            message = f"checkpoint.keep_last is {keep}: allowed is 1 or more, the newest always stays"
            raise ConfigError(message)
        if self.checkpoint.layout == "sharded" and self.strategy not in SHARDED:
            message = (
                f"checkpoint.layout is sharded with strategy {self.strategy}, which keeps whole weights on "
                "every rank: allowed is whole, or sharded with strategy fsdp2 or hsdp"
            )
            raise ConfigError(message)
        if self.pillars.device_prefetch < 0 or self.pillars.prefetch_factor < 1:
            message = (
                f"pillars.device_prefetch is {self.pillars.device_prefetch} and pillars.prefetch_factor "
                f"{self.pillars.prefetch_factor}: allowed are 0 (off) or more, and 1 or more"
            )
            raise ConfigError(message)
        check_fusion(self.pillars.fuse, self.accumulation)
        if self.elastic.enabled:
            self._check_elastic()

    def _check_elastic(self) -> None:
        """Refuse state that is split over ranks, and data that cannot be dealt to other ranks."""
        for name, value, fits, allowed in (
            (
                "strategy",
                self.strategy,
                self.strategy == "ddp",
                "ddp, where every rank holds the whole state",
            ),
            ("pillars.data", self.pillars.data, self.pillars.data == "on", "on, which deals an epoch anew"),
            ("compile", self.compile, not self.compile, "off"),
        ):
            if not fits:
                msg = f"elastic is on with {name} {value}: allowed is {allowed}; or switch elastic off"
                raise ConfigError(msg)
        for name in ("check_every", "min_ranks"):
            _positive(f"elastic.{name}", getattr(self.elastic, name))
        if self.elastic.heartbeat_s < 1:
            msg = f"elastic.heartbeat_s is {self.elastic.heartbeat_s}: allowed is 1 second or more"
            raise ConfigError(msg)


def check_fusion(fuse: int | str, accumulation: int) -> None:
    """Refuse a fusion batch size that does not divide the accumulation (mission F2)."""
    if isinstance(fuse, int):
        if fuse < 1:
            msg = f"fusion_batch_size is {fuse}: allowed is 1 or more, or off"
            raise ConfigError(msg)
        if accumulation % fuse:
            divisors = [d for d in range(1, accumulation + 1) if accumulation % d == 0]
            message = (
                f"fusion_batch_size is {fuse} but gradient_accumulation_steps is {accumulation}: "
                f"it must divide it; allowed here: {divisors}. Change one of the two, or switch fusion off"
            )
            raise ConfigError(message)


def _positive(name: str, value: int | None, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    if value is None or value < 1:
        msg = f"{name} is {value}: allowed is a whole number of at least 1"
        raise ConfigError(msg)


def to_dict(config: object) -> dict[str, object]:
    """Return a (nested) configuration as plain dicts, lists and scalars; None values are kept."""
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        msg = f"expected a configuration object, got {type(config).__name__}"
        raise TypeError(msg)
    result: dict[str, object] = {}
    for entry in dataclasses.fields(config):
        value = getattr(config, entry.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            result[entry.name] = to_dict(value)
        elif isinstance(value, tuple):
            result[entry.name] = list(value)
        elif isinstance(value, Mapping):
            result[entry.name] = dict(value)
        else:
            result[entry.name] = value
    return result


def to_toml(config: TrainConfig) -> str:
    """Return the configuration as TOML; settings that are None stand as comments."""
    import tomli_w

    def prune(values: Mapping[str, object]) -> dict[str, object]:
        pruned: dict[str, object] = {}
        for key, value in values.items():
            if isinstance(value, Mapping):
                pruned[key] = prune(value)
            elif value is not None:
                pruned[key] = value
        return pruned

    values = to_dict(config)
    unset = [key for key, value in values.items() if value is None]
    header = "".join(f"# {key} is not set\n" for key in unset)
    return header + tomli_w.dumps(prune(values))


def read_file(path: str | Path) -> dict[str, object]:
    """Read a TOML or YAML configuration file into nested dicts.

    Raises:
        ConfigError: The file is missing, has another suffix, or cannot be parsed.
    """
    file = Path(path)
    if not file.is_file():
        msg = f"configuration file {file} does not exist"
        raise ConfigError(msg)
    try:
        if file.suffix == ".toml":
            return tomllib.loads(file.read_text(encoding="utf-8"))
        if file.suffix in {".yaml", ".yml"}:
            import yaml

            loaded = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
            if not isinstance(loaded, dict):
                msg = f"{file} holds a {type(loaded).__name__}: allowed is a mapping of settings"
                raise ConfigError(msg)
            return loaded
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        msg = f"{file} is not valid: {error}"
        raise ConfigError(msg) from error
    except Exception as error:
        if type(error).__module__.startswith("yaml"):
            msg = f"{file} is not valid YAML: {error}"
            raise ConfigError(msg) from error
        raise
    msg = f"{file} has the suffix {file.suffix or '(none)'}: allowed are .toml, .yaml, .yml"
    raise ConfigError(msg)


def build_config(*layers: Mapping[str, object]) -> TrainConfig:
    """Merge layers (later ones win, nested) and build the checked configuration.

    Raises:
        ConfigError: An unknown name (with the nearest known ones), or a value of the wrong type.
    """
    merged: dict[str, object] = {}
    for layer in layers:
        _merge(merged, layer)
    return _build(TrainConfig, merged, "")


def _merge(into: dict[str, object], layer: Mapping[str, object]) -> None:
    for key, value in layer.items():
        old = into.get(key)
        if isinstance(old, dict) and isinstance(value, Mapping):
            _merge(old, value)
        else:
            into[key] = dict(value) if isinstance(value, Mapping) else value


def _build(kind: type[_T], values: Mapping[str, object], prefix: str) -> _T:
    hints = get_type_hints(kind)
    known = [entry.name for entry in dataclasses.fields(kind)]  # type: ignore[arg-type]
    arguments: dict[str, object] = {}
    for key, value in values.items():
        if key not in known:
            import difflib

            near = difflib.get_close_matches(key, known, n=3) or known
            msg = f"unknown setting {prefix}{key}: allowed here are {', '.join(near)}"
            raise ConfigError(msg)
        hint = hints[key]
        if dataclasses.is_dataclass(hint):
            if not isinstance(value, Mapping):
                msg = f"{prefix}{key} is {value!r}: allowed is a table of settings"
                raise ConfigError(msg)
            arguments[key] = _build(hint, value, f"{prefix}{key}.")  # type: ignore[arg-type]
        else:
            arguments[key] = convert(value, hint, prefix + key)
    return kind(**arguments)
