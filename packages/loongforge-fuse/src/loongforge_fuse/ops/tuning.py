"""Measures the ways of doing each job on this GPU and keeps the fastest; see ``variants``.

Times are device times: the calls of one way are captured in a CUDA graph, over enough buffers to defeat the
L2 cache, and replays are timed. Needs a GPU and the kernels of the family ``tuning`` (compiled when missing).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from loongforge_fuse.autotune import Autotuner, Decision
from loongforge_fuse.ops import variants
from loongforge_fuse.ops.dropout import philox_counter, philox_next
from loongforge_fuse.ops.elementwise import GELU_DROPOUT_WAYS, gelu_tanh
from loongforge_fuse.ops.image import TABLE_JOB, TABLE_WAYS, image_table, image_table_to_half
from loongforge_fuse.ops.norm_launch import backward_job, forward_job, run_norm, run_norm_backward
from loongforge_fuse.ops.norm_plan import backward_ways, forward_ways
from loongforge_fuse.ops.patch_launch import gather_job, rows_backward_cuda, rows_cuda, scatter_job
from loongforge_fuse.ops.patch_plan import (
    CLEAR_JOB,
    CLEAR_WAYS,
    PATCHES,
    gather_ways,
    padded_length,
    patch_table,
    scatter_ways,
)
from loongforge_fuse.ops.quantise import quantise_rows
from loongforge_fuse.ops.quantise_plan import FLOAT8_CAPABILITY, job_of, ways_of
from loongforge_fuse.ops.rope import BACKWARD_JOB as ROPE_JOB
from loongforge_fuse.ops.rope import BACKWARD_WAYS as ROPE_WAYS

Work = Callable[[], object]
_BF16 = torch.bfloat16
_L2_BYTES = 64 * 2**20
_MAX_BUFFERS = 16
# Width, LayerNorm or not, rows and groups of rows of the model at 16 samples: vision, action head with and
# without modulation, language, and LayerNorm at the width of the language.
_MODEL_ROWS = (
    (1152, True, 32 * 324, 1),
    (1536, True, 16 * 51, 16),
    (1536, True, 16 * 51, 1),
    (2048, False, 16 * 220, 1),
    (2048, True, 32 * 81, 1),
    (2048, True, 32 * 81, 16),
)
# Width, rows at 16 samples and activation in front of the float8 layers of vision and language.
_QUANTISED = (
    (1152, 32 * 324, "none"),
    (4304, 32 * 324, "none"),
    (4304, 32 * 324, "gelu_tanh"),
    (4608, 32 * 81, "none"),
    (2048, 16 * 220, "none"),
    (6144, 16 * 220, "none"),
    (6144, 16 * 220, "silu_mul"),
)
_LARGE_ELEMENTS = 2**25
_HALF = [0.5, 0.5, 0.5]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One choice to measure.

    Attributes:
        name: as the operators ask for it.
        ways: what to choose from, the default first.
        make: builds inputs on the current device and returns a call on them.
        size: bytes that one call moves.
    """

    name: str
    ways: tuple[str, ...]
    make: Callable[[], Work]
    size: int


def _half(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").to(_BF16)


def _gelu_job() -> Job:
    rows = _LARGE_ELEMENTS // 2048

    def make() -> Work:
        x, key = _half(rows, 2048), philox_next(philox_counter(1, "cuda"))
        return lambda: gelu_tanh(x, p=0.2, key=key)

    return Job(name="gelu_dropout", ways=GELU_DROPOUT_WAYS, make=make, size=4 * _LARGE_ELEMENTS)


def _patch_jobs() -> Iterator[Job]:
    for patch, x in product((14, 16), ("u8", "bf16")):
        form = {"last": x == "u8", "planar": x != "u8"}
        side = 18 * patch
        count = 200 * side * side * 3

        def gather(patch: int = patch, x: str = x, side: int = side, count: int = count) -> Work:
            table = patch_table([(side, side)] * 200, patch, planar=x != "u8").cuda()
            if x == "u8":
                pixels = torch.randint(0, 256, (count,), dtype=torch.uint8, device="cuda")
            else:
                pixels = _half(count)
            flags = (x == "u8", x != "u8")
            return lambda: rows_cuda(pixels, table, None, patch, *flags, _HALF, _HALF, _BF16, False)

        yield Job(
            name=gather_job(x, "bf16", patch, **form),
            ways=gather_ways(x, "bf16", patch, **form),
            make=gather,
            size=count * (3 if x == "u8" else 4),
        )
        if x == "u8":
            continue

        def scatter(patch: int = patch, side: int = side, count: int = count) -> Work:
            table = patch_table([(side, side)] * 200, patch, planar=True).cuda()
            grad = _half(table.shape[0], padded_length(patch))
            return lambda: rows_backward_cuda(grad, table, None, patch, False, True, count, _BF16, True)

        yield Job(
            name=scatter_job("bf16", "bf16", patch, **form),
            ways=scatter_ways("bf16", "bf16", patch, **form),
            make=scatter,
            size=4 * count,
        )
        if patch == PATCHES[0]:

            def clear(patch: int = patch, side: int = side, count: int = count) -> Work:
                table = patch_table([(side, side)] * 200, patch, planar=True).cuda()
                grad = _half(table.shape[0], padded_length(patch))
                return lambda: rows_backward_cuda(grad, table, None, patch, False, True, count, _BF16, False)

            yield Job(name=CLEAR_JOB, ways=CLEAR_WAYS, make=clear, size=6 * count)


def _table_job() -> Job:
    images = 256

    def make() -> Work:
        data = torch.randint(0, 256, (images * 256 * 256 * 3,), dtype=torch.uint8, device="cuda")
        table = image_table([(256, 256)] * images, crops=[(2, 2, 252, 252)] * images).cuda()
        return lambda: image_table_to_half(data, table, (256, 256))

    size = images * 3 * (252 * 252 + 2 * 256 * 256)
    return Job(name=TABLE_JOB, ways=TABLE_WAYS, make=make, size=size)


def _rope_job() -> Job:
    rows = _LARGE_ELEMENTS // 2048

    def make() -> Work:
        x, w, g = _half(16, rows // 16, 16, 128), _half(128), _half(16, rows // 16, 16, 128)
        cos, sin = _half(rows // 16, 128), _half(rows // 16, 128)
        back = torch.ops.loongforge.head_norm_rope_backward
        return lambda: back(g, x, w, cos, sin, 1e-6, True)

    return Job(name=ROPE_JOB, ways=ROPE_WAYS, make=make, size=6 * _LARGE_ELEMENTS)


def _norm_jobs() -> Iterator[Job]:
    for (width, layer, rows, groups), large in product(_MODEL_ROWS, (True, False)):
        if large:
            rows = _LARGE_ELEMENTS // width // groups * groups
        modulate = groups > 1
        shape = (groups, rows // groups, width)
        settings = (layer, modulate)

        def tables(shape: tuple[int, int, int] = shape) -> Tensor:
            return _half(shape[0], shape[2]) if shape[0] > 1 else _half(shape[2])

        for residual in (False, True):

            def forward(
                shape: tuple[int, int, int] = shape,
                residual: bool = residual,  # noqa: FBT001 - bound now
                settings: tuple[bool, bool] = settings,
                tables: Callable[[], Tensor] = tables,
            ) -> Work:
                x, r, w = _half(*shape), _half(*shape) if residual else None, tables()
                return lambda: run_norm(x, r, w, w if settings[0] else None, *settings, 1e-6, _BF16)

            yield Job(
                name=forward_job(width, layer=layer, residual=residual, large=large, modulate=modulate),
                ways=tuple(
                    forward_ways(width, residual=residual, large=large, layer=layer, modulate=modulate)
                ),
                make=forward,
                size=(8 if residual else 4) * rows * width,
            )
        for columns in (False, True):

            def backward(
                shape: tuple[int, int, int] = shape,
                columns: bool = columns,  # noqa: FBT001 - bound now
                settings: tuple[bool, bool] = settings,
                tables: Callable[[], Tensor] = tables,
            ) -> Work:
                x, g, w = _half(*shape), _half(*shape), tables()
                count = shape[0] * shape[1]
                mean, rstd = torch.zeros(count, device="cuda"), torch.ones(count, device="cuda")
                layer, modulate = settings
                offset = columns and layer
                return lambda: run_norm_backward(
                    g, None, x, w, mean, rstd, layer, modulate, shape[1], columns, offset, shape[0]
                )

            yield Job(
                name=backward_job(width, layer=layer, columns=columns, large=large, modulate=modulate),
                ways=tuple(
                    backward_ways(width, columns=columns, modulate=modulate, large=large, layer=layer)
                ),
                make=backward,
                size=6 * rows * width,
            )


def _quantise_jobs() -> Iterator[Job]:
    for width, rows, activation in _QUANTISED:

        def make(width: int = width, rows: int = rows, activation: str = activation) -> Work:
            x = _half(rows, width)
            up = _half(rows, width) if activation == "silu_mul" else None
            return lambda: quantise_rows(x, up=up, activation=activation)

        yield Job(
            name=job_of(width, activation),
            ways=tuple(ways_of(width, activation)),
            make=make,
            size=(5 if activation == "silu_mul" else 3) * rows * width,
        )


def jobs() -> tuple[Job, ...]:
    """Return all choices that measurement may decide here; makes nothing on the device yet."""
    found = [_gelu_job(), _table_job(), _rope_job(), *_patch_jobs(), *_norm_jobs()]
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() >= divmod(FLOAT8_CAPABILITY, 10):
        found += _quantise_jobs()
    return tuple(j for j in found if len(j.ways) > 1)


def _captured(job: Job, way: str) -> Work:
    """Return a replay of calls that use `way`."""
    calls = [job.make() for _ in range(max(2, min(_MAX_BUFFERS, -(-4 * _L2_BYTES // job.size))))]
    with variants.forced(job.name, way):
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for call in calls:
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
    # The graph reads the inputs that the calls hold.
    kept = calls

    def replay() -> object:
        graph.replay()
        return kept

    return replay


def tune(
    tuner: Autotuner | None = None,
    chosen: Sequence[Job] | None = None,
    *,
    report: Callable[[Job, Decision], None] | None = None,
) -> dict[str, Decision]:
    """Measure every choice that has no decision yet, keep the decisions, and use them from now on.

    Args:
        tuner: measures and remembers; default: the user cache.
        chosen: the choices; default: :func:`jobs`.
        report: called after each choice.

    Returns:
        The decision for each job. A way that does not run counts as infinitely slow; the default must run.
    """
    measuring = tuner or Autotuner()
    found: dict[str, Decision] = {}
    for job in chosen if chosen is not None else jobs():
        known = measuring.known(variants.PREFIX + job.name)
        decision = known if known is not None and known.winner in job.ways else _decide(measuring, job)
        found[job.name] = decision
        if report is not None:
            report(job, decision)
    variants.reload(measuring)
    return found


def _decide(tuner: Autotuner, job: Job) -> Decision:
    replays: dict[str, Work] = {}

    def lazily(way: str) -> Work:
        def work() -> object:
            if way not in replays:
                replays[way] = _captured(job, way)
            return replays[way]()

        return work

    try:
        return tuner.decide(variants.PREFIX + job.name, {way: lazily(way) for way in job.ways})
    finally:
        replays.clear()
        torch.cuda.empty_cache()
