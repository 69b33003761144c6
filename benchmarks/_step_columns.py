"""The columns of the step benchmark: ways to run one optimizer step of the same model on the same samples.

Every column works on a shell of the model: the same parameters in modules of its own, so that what one column
compiles, patches or swaps is not seen by another and all can take turns in one process.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import _groot_full as groot
import torch
from _step_stock import STOCK, loss_without_dropout, stock_of, transformers_version
from loongforge_fuse import (
    FusedAdamW,
    FusionConfig,
    GraphConfig,
    GraphRunner,
    MicroBatchFuser,
    PrecisionPolicy,
    apply_fused_ops,
    apply_precision,
    compile_regions,
    join_linears,
    measure_deviation,
)
from loongforge_fuse.graphs import Ahead, FrozenAhead
from loongforge_fuse.graphs.backend import CudaBackend
from torch import Tensor, nn
from torch import _dynamo as dynamo
from torch import _inductor as inductor
from torch.nn.attention import SDPBackend, sdpa_kernel

MICRO, SAMPLES, CLIP, LR, DECAY = 4, 4, 1.0, 1e-4, 1e-5

COLUMNS = (
    "eager_4x4",
    "eager_1x16",
    "fused_eager",
    "graph_4x4",
    "graph_fused",
    "graph_fused_compile",
    "ours+adam+ops+plain",
    "ours+adam+ops+plain+ahead",
    "ours+adam+ops+plain+beside+ahead+spare66",
    "ours+adam+ops+plain+ahead+spare66+fp8",
    *STOCK,
    "compile_1x16",
)
MIXED_COLUMNS = ("eager_1x16", "graph_fused_compile", "ours+masters")

ATTENTION = {
    "cudnn": (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION),
    "flash": (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION),
}
INDUCTOR: Mapping[str, Mapping[str, object]] = {
    "combo": {"combo_kernels": True},
    "multi": {"triton.multi_kernel": 1},
    "descent": {"coordinate_descent_tuning": True},
}
OPTIONS = {
    *("adam", "masters", "ops", "fp8", "join", "plain", "beside", "ahead", "split", "first"),
    *ATTENTION,
    *INDUCTOR,
}

HEAD_SIBLINGS = (("to_q", "to_k", "to_v"), ("to_k", "to_v"))
"""Layers of one input in the action head."""

Step = Callable[[], Tensor]


@dataclass
class Bench:
    """The model, samples and optimizer that all columns of one precision share.

    Attributes:
        device: ``cuda`` or ``cpu``.
        model: The model; columns work on shells of it.
        window: Four micro-batches, of four samples unless asked otherwise.
        autocast: Whether the trainable weights are float32, under autocast.
        joined: A shell whose sibling linear layers are joined, where a column asks for one. Joining moves
            weights, so it is done before anything takes their addresses.
        products_saved: Products fewer in a forward pass of ``joined``.
    """

    device: str
    model: nn.Module
    window: list[dict[str, object]]
    autocast: bool
    joined: nn.Module | None = None
    products_saved: int = 0
    large: dict[str, object] = field(init=False)
    stock: torch.optim.Optimizer = field(init=False)
    _wide: list[Tensor] = field(default_factory=list)
    _half: list[Tensor] = field(default_factory=list)
    _now_half: bool = False
    _first: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.large = groot.joined(self.window)
        self.stock = torch.optim.AdamW(
            self.trainable(), lr=LR, weight_decay=DECAY, fused=True, capturable=self.device == "cuda"
        )

    def trainable(self) -> list[nn.Parameter]:
        """Return the parameters that train."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def start_again(self) -> None:
        """Give the weights the values they were built with.

        Thousands of steps on the same samples would end in weights, and with them in numbers that a
        multiplier spends less power on, that no training sees.
        """
        values = self._wide or [p.data for p in self.trainable()]
        if not self._first:
            self._first = [value.clone() for value in values]
        torch._foreach_copy_(values, self._first)
        if self._half:
            torch._foreach_copy_(self._half, self._first)

    def shell(self) -> nn.Module:
        """Return the model with the same parameters in new modules."""
        return shell_of(self.model)

    def store(self, *, half: bool) -> None:
        """Let the trainable parameters be their bf16 copies, or what they were built as; drop gradients."""
        trainable = self.trainable()
        self._wide = self._wide or [p.data for p in trainable]
        if half and not self._half:
            self._half = [data.to(torch.bfloat16) for data in self._wide]
        for parameter, data in zip(trainable, self._half if half else self._wide, strict=True):
            parameter.grad = None
            parameter.data = data
        self._now_half = half

    @contextlib.contextmanager
    def precision(self) -> Iterator[None]:
        """Autocast when the trainable weights are float32."""
        enabled = self.autocast and not self._now_half
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=enabled):
            yield


def shell_of(model: nn.Module) -> nn.Module:
    """Return a model with the same parameters in new modules."""
    shared = {id(t): t for t in [*model.parameters(), *model.buffers()]}
    return copy.deepcopy(model, shared)


def make_bench(*, tiny: bool, device: str, mixed: bool, join: bool = False, samples: int = SAMPLES) -> Bench:
    """Build the model and micro-batches of ``samples``; with ``join``, a shell with joined layers too."""
    model = groot.build(tiny=tiny, device=device, masters=mixed)
    joined, saved = None, 0
    if join:
        joined = shell_of(model)
        # Joined in the frozen tower, queries, keys and values come out as parts that attention copies first.
        saved = join_linears(joined, HEAD_SIBLINGS).products_saved
    window = [groot.micro_batch(samples, model=model, device=device, seed=i) for i in range(MICRO)]
    return Bench(
        device=device, model=model, window=window, autocast=mixed, joined=joined, products_saved=saved
    )


@dataclass
class Column:
    """A column that is ready to take its turns.

    Attributes:
        step: One optimizer step; returns the loss.
        facts: What its row says beside times.
        half: Whether its trainable weights are stored in bf16, with float32 masters in the optimizer.
    """

    step: Step
    facts: dict[str, object] = field(default_factory=dict)
    half: bool = False


def build(name: str, bench: Bench, stack: contextlib.ExitStack, preparing: contextlib.ExitStack) -> Column:
    """Return a column by its name.

    Args:
        name: One of :data:`COLUMNS`, or ``ours`` with any of :data:`OPTIONS`, joined by ``+``.
        bench: What the columns share.
        stack: Closed when the measurement is over.
        preparing: Closed after the first steps, which compile and capture.

    Raises:
        ValueError: Unknown column or option.
    """
    model = bench.shell()
    kind, *options = name.split("+")
    if kind == "ours":
        return _ours(bench, model, set(options), stack, preparing)
    if name in STOCK:
        return _stock(bench, model, bench.window if name == "stock_4x4" else [bench.large])
    makers: Mapping[str, Callable[[], Step]] = {
        "eager_4x4": lambda: plain_step(bench, bench.window, model),
        "eager_1x16": lambda: plain_step(bench, [bench.large], model),
        "fused_eager": lambda: fused_step(bench, model),
        "graph_4x4": lambda: graph_step(bench, model, stack, factor=1),
        "graph_fused": lambda: graph_step(bench, model, stack),
        "graph_fused_compile": lambda: graph_step(bench, model, stack, regional=True),
        "compile_regions_1x16": lambda: _regional(bench, model, stack),
        "compile_1x16": lambda: plain_step(bench, [bench.large], _whole(bench, model)),
    }
    if name not in makers:
        known = ", ".join([*makers, *STOCK])
        message = f"unknown column {name}, known: {known}, ours+{{{','.join(sorted(OPTIONS))}}}"
        raise ValueError(message)
    if "regions" in name or name == "graph_fused_compile":
        forget_blocks(model)
    bench.store(half=False)
    return Column(step=makers[name]())


def plain_step(bench: Bench, batches: Sequence[dict[str, object]], model: nn.Module) -> Step:
    """Plain PyTorch: accumulate over ``batches``, clip, step."""
    trainable = bench.trainable()

    def step() -> Tensor:
        bench.stock.zero_grad(set_to_none=True)
        losses = []
        for batch in batches:
            with bench.precision():
                loss = model(bench.model.draw(batch))["loss"] / len(batches)
            loss.backward()
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(trainable, CLIP, foreach=True)
        bench.stock.step()
        return torch.stack(losses).sum()

    return step


def fused_step(bench: Bench, model: nn.Module) -> Step:
    """Fused micro-batches, eager."""
    trainable = bench.trainable()
    fuser = MicroBatchFuser(model, FusionConfig(fusion_batch_size=MICRO))

    def step() -> Tensor:
        bench.stock.zero_grad(set_to_none=True)
        with bench.precision():
            outcome = fuser.run(bench.window)
        if not outcome.fused:
            message = f"not fused: {outcome.reason}: {outcome.detail}"
            raise RuntimeError(message)
        torch.nn.utils.clip_grad_norm_(trainable, CLIP, foreach=True)
        bench.stock.step()
        return outcome.loss

    return step


def graph_step(
    bench: Bench,
    model: nn.Module,
    stack: contextlib.ExitStack,
    *,
    factor: int = MICRO,
    regional: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
    ahead: bool = False,
    spare: int = 0,
    split: bool = False,
    priority: int = 0,
    beside: bool = False,
) -> Step:
    """Graphed steps, clip and optimizer inside the graph.

    With ``ahead`` each step starts the frozen part of the next one's samples before its own replay, so that
    every step contains one frozen and one trainable part.
    """
    config = GraphConfig(
        mode="auto" if bench.device == "cuda" else "emulated",
        gradients="overwrite" if factor == MICRO else "accumulate",
        weight_gradients="beside" if beside else "in_line",
        zero_in_graph=True,
        max_norm=CLIP,
        # On the CPU, a dry run, the blocks stay as they are: compiling them there takes minutes.
        compile=regional and bench.device == "cuda",
    )
    device = next(model.parameters()).device
    backend = CudaBackend(device, priority=priority) if bench.device == "cuda" else None
    runner = GraphRunner(model, config, optimizer=optimizer or bench.stock, backend=backend)
    stack.callback(runner.release)
    early = None
    if ahead:
        kind = torch.bfloat16 if bench.autocast else None
        early = FrozenAhead(model, autocast=kind, spare_sms=spare, split=split)
        stack.callback(early.release)
    under_way: Ahead | None = None

    def before_optimizer() -> None:
        if under_way is not None:
            under_way.finish()

    runner.before_optimizer = before_optimizer
    fuser = MicroBatchFuser(model, FusionConfig(fusion_batch_size=factor), executor=runner)
    tries = 0

    def step() -> Tensor:
        nonlocal tries, under_way
        window: Sequence[Mapping[str, object]] = bench.window
        if early is not None:
            window = (under_way or early.start(bench.window)).take()
            under_way = early.start(bench.window)
        with bench.precision():
            outcome = fuser.run(window)
        tries += 1
        if tries > 4 and not outcome.graph:
            message = f"no graph: {outcome.graph_reason}: {dict(runner.stats().failures)}"
            raise RuntimeError(message)
        if tries > 4 and early is not None and bench.device == "cuda" and not early.stats().replays:
            message = f"no graph of the frozen part: {early.stats()}"
            raise RuntimeError(message)
        return outcome.loss

    return step


def _whole(bench: Bench, model: nn.Module) -> nn.Module:
    """Compile the whole model; on the CPU, a dry run, it is only traced."""
    backend = "inductor" if bench.device == "cuda" else "eager"
    return torch.compile(model, dynamic=False, backend=backend)


def _regional(bench: Bench, model: nn.Module, stack: contextlib.ExitStack) -> Step:
    if bench.device == "cuda":
        stack.callback(compile_regions(model).undo)
    return plain_step(bench, [bench.large], model)


def _stock(bench: Bench, model: nn.Module, batches: Sequence[dict[str, object]]) -> Column:
    """Plain PyTorch on the model as published, around the same parameters."""
    bench.store(half=False)
    drawn = bench.model.draw(bench.window[0])
    with bench.precision():
        ours = loss_without_dropout(model, drawn)
        off = abs(loss_without_dropout(stock_of(model), drawn) / ours - 1)
    facts: dict[str, object] = {"transformers": transformers_version(), "stock_loss_deviation": off}
    return Column(step=plain_step(bench, batches, model), facts=facts)


def _ours(
    bench: Bench,
    model: nn.Module,
    options: set[str],
    stack: contextlib.ExitStack,
    preparing: contextlib.ExitStack,
) -> Column:
    """Everything together, with options that were or were not found to help."""
    spare = [int(name.removeprefix("spare")) for name in options if re.fullmatch(r"spare\d+", name)]
    unknown = {name for name in options if not re.fullmatch(r"spare\d+", name)} - OPTIONS
    if unknown:
        message = f"unknown options {sorted(unknown)}, known: {sorted(OPTIONS)}"
        raise ValueError(message)
    facts: dict[str, object] = {}
    if "join" in options:
        if bench.joined is None:
            message = "one column only can have joined layers, and none was prepared"
            raise ValueError(message)
        model, bench.joined = bench.joined, None
        facts["products_saved"] = bench.products_saved
    for name in sorted(options & set(ATTENTION)):
        order = [*ATTENTION[name], SDPBackend.MATH]
        preparing.enter_context(sdpa_kernel(order, set_priority=True))
    for name in sorted(options & set(INDUCTOR)):
        preparing.enter_context(inductor.config.patch(dict(INDUCTOR[name])))
    if "ops" in options:
        facts["patched"] = apply_fused_ops(model).patched
    if "fp8" in options:
        facts.update(float8_deviation(bench, model))
        apply_precision(model, PrecisionPolicy.float8_frozen())
    # Code compiled for another column with other options would be found and used again.
    forget_blocks(model)
    masters = "masters" in options
    bench.store(half=masters)
    optimizer = None
    if options & {"adam", "masters"}:
        optimizer = FusedAdamW(
            bench.trainable(),
            lr=LR,
            weight_decay=DECAY,
            master_weights=masters,
            state_dtype=torch.float32 if masters else None,
        )
    step = graph_step(
        bench,
        model,
        stack,
        regional="plain" not in options,
        optimizer=optimizer,
        ahead="ahead" in options,
        spare=spare[0] if spare else 0,
        split="split" in options,
        priority=-1 if "first" in options else 0,
        beside="beside" in options,
    )
    return Column(step=step, facts=facts, half=masters)


def forget_blocks(model: nn.Module) -> None:
    """Drop what was compiled for the classes of repeated blocks."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            for child in module:
                dynamo.eval_frame.reset_code(type(child).forward.__code__)


def float8_deviation(bench: Bench, model: nn.Module) -> dict[str, object]:
    """Measure what float8 in the frozen layers does to the loss and to the features they hand on."""
    layers = model.config.first_trainable_layer
    watched = ("backbone.model.mlp1", f"backbone.model.language_model.model.layers.{layers - 1}")
    model.eval()
    try:
        batch = bench.model.draw(bench.large)

        def loss() -> Tensor:
            with bench.precision():
                return model(batch)["loss"]

        found = measure_deviation(model, PrecisionPolicy.float8_frozen(), loss, watch=watched)
    finally:
        model.train()
    similarity = {name.rsplit(".", 2)[-1]: value for name, value in found.similarity.items()}
    return {"float8_loss_deviation": found.loss_deviation, "float8_similarity": similarity}
