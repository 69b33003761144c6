"""The simulator itself: it runs kernels as a GPU would, and names what a GPU would only suffer from."""

from __future__ import annotations

import ast

import numpy as np
import pytest
from loongforge_fuse.kernels import specs
from loongforge_fuse.kernels.simulator import Memory, SimulationError, intrinsics, simulate, translate
from loongforge_fuse.kernels.specs import SOURCE, KernelSpec

HEADER = """
from numba import cuda, float32, int64, uint32
from loongforge_fuse.kernels.source.intrinsics import LOAD, SHARED_LOAD, STORE_SCALAR, load_i32, store_i32
from loongforge_fuse.kernels.source.common import FULL_WARP, narrow_sum

def made():
    def kernel(pin, pout, count):
        t = cuda.threadIdx.x
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the lines of a kernel with a block of 64 threads on 64 int32 in and out."""
    for name in ("common", "indexing"):
        (tmp_path / f"{name}.py").write_text((SOURCE / f"{name}.py").read_text())
    monkeypatch.setattr(specs, "SOURCE", tmp_path)
    monkeypatch.setattr(translate, "SOURCE", tmp_path)
    (tmp_path / "intrinsics.py").write_text("")

    def go(lines: str, *, shift: int = 0, grid: int = 1) -> np.ndarray:
        body = "".join(f"        {line}\n" for line in lines.strip().splitlines())
        (tmp_path / "probe.py").write_text(HEADER + body + "    return kernel\n")
        spec = KernelSpec(module="probe", maker="made", arguments="PPq", block=64)
        memory = Memory()
        data, out = np.arange(64, dtype=np.int32), np.full(64, -1, dtype=np.int32)
        at = memory.add(data, "in", shift=shift), memory.add(out, "out", written=False)
        simulate(spec, memory, (grid, 1), (*at, 64))
        return out

    return go


def test_barriers_order_shared_memory(run):
    out = run("""
scratch = cuda.shared.array(64, uint32)
scratch[t] = load_i32(pin, t)
cuda.syncthreads()
store_i32(pout, t, scratch[63 - t])
""")
    assert out.tolist() == list(range(63, -1, -1))


def test_a_barrier_of_some_warps_orders_them_and_no_others(run):
    lines = """
scratch = cuda.shared.array(64, uint32)
scratch[t] = load_i32(pin, t)
some_barrier(1 + t // 32, 32)
store_i32(pout, t, scratch[{read}])
"""
    assert run(lines.format(read="t ^ 31")).tolist() == [t ^ 31 for t in range(64)]
    with pytest.raises(SimulationError, match=r"shared slot .* no barrier between|never written"):
        run(lines.format(read="63 - t"))


def test_a_barrier_of_some_warps_that_too_few_reach_is_an_error(run):
    with pytest.raises(SimulationError, match=r"waits for ever at \['some'\]"):
        run("some_barrier(1, 96)")
    with pytest.raises(SimulationError, match="threads wait at barrier 16"):
        run("some_barrier(16, 64)")


def test_a_missing_barrier_is_a_race(run):
    with pytest.raises(SimulationError, match=r"shared slot .* no barrier between|never written"):
        run("""
scratch = cuda.shared.array(64, uint32)
scratch[t] = load_i32(pin, t)
store_i32(pout, t, scratch[t ^ 33])
""")


def test_a_warp_barrier_orders_one_warp_and_no_other(run):
    lines = """
scratch = cuda.shared.array(64, uint32)
scratch[t] = load_i32(pin, t)
cuda.syncwarp()
store_i32(pout, t, scratch[t ^ {}])
"""
    assert run(lines.format(1)).tolist() == [i ^ 1 for i in range(64)]
    with pytest.raises(SimulationError, match=r"no barrier between|never written"):
        run(lines.format(32))


def test_shuffles_exchange_between_lanes_through_called_functions(run):
    out = run("""
total = narrow_sum(load_i32(pin, t), 32)
store_i32(pout, t, total)
""")
    assert out.tolist() == [sum(range(32))] * 32 + [sum(range(32, 64))] * 32


def test_a_shuffle_that_lanes_miss_is_an_error(run):
    with pytest.raises(SimulationError, match="not all lanes take part in a shuffle"):
        run("""
if t > 3:
    store_i32(pout, t, narrow_sum(1, 32))
""")


def test_a_barrier_that_some_never_reach_is_an_error(run):
    # A thread that has ended does not count; one that waits elsewhere does.
    with pytest.raises(SimulationError, match="waits for ever at"):
        run("""
if t < 32:
    cuda.syncwarp()
    cuda.syncthreads()
if t == 40:
    cuda.syncwarp()
cuda.syncthreads()
""")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("store_i32(pout, 64 + t, 1)", r"out \+ \d+, which has 256 bytes"),
        ("store_i32(pout, -1 - t, 1)", "where nothing is|which has"),
        ("store_i32(pout, t >> 1, 1)", "store to out .* races with the write of thread"),
        ("store_i32(pout, t, load_i32(pout, t))", "never written"),
        ("store_i32(pin, t ^ 1, load_i32(pin, t))", "races with"),
    ],
)
def test_wrong_accesses_are_named(run, line, words):
    with pytest.raises(SimulationError, match=words):
        run(line)


def test_wide_accesses_must_be_aligned(run):
    lines = """
v = cuda.local.array(4, float32)
if t < 4:
    LOAD["f32", 4](pin, t, v, 0)
"""
    run(lines)
    with pytest.raises(SimulationError, match=r"load of 16 bytes at in .* misaligned"):
        run(lines, shift=4)


def test_blocks_share_no_memory_and_race_through_global_memory(run):
    with pytest.raises(SimulationError, match="races with the write of thread"):
        run("store_i32(pout, t, 1)", grid=2)


def test_a_wrong_number_of_arguments_is_refused():
    spec = KernelSpec(module="counter", maker="philox_tick", arguments="PPq", block=32)
    with pytest.raises(ValueError, match="takes 3 arguments, got 1"):
        simulate(spec, Memory(), (1, 1), (1,))
    with pytest.raises(ValueError, match="must be contiguous"):
        Memory().add(np.zeros((4, 4))[:, ::2], "x")


def test_the_simulator_knows_every_intrinsic_that_kernels_import():
    known = set(intrinsics.bound(Memory()))
    wanted = set()
    replaced = ("intrinsics", "reading")
    for path in SOURCE.glob("*.py"):
        for node in [] if path.stem in replaced else ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).rpartition(".")[2] in replaced:
                wanted |= {alias.name for alias in node.names}
    assert wanted <= known
    trees = [ast.parse((SOURCE / f"{name}.py").read_text()) for name in replaced]
    names = set()
    for node in [node for tree in trees for node in tree.body]:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                parts = target.elts if isinstance(target, ast.Tuple) else [target]
                names |= {p.id for p in parts if isinstance(p, ast.Name)}
    public = {n for n in names if not n.startswith("_")} - {"ADDRESS", "FLOATS", "Device"}
    assert public == known


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_rounding_is_to_nearest_even_as_in_torch(dtype):
    import torch

    kind = {"bf16": torch.bfloat16, "f16": torch.float16}[dtype]
    values = torch.cat(
        (torch.randn(4096) * 1e3, torch.tensor([0.0, -0.0, float("inf"), 1e-42, 3.4e38, 65519.9]))
    )
    want = values.to(kind)
    words = intrinsics.narrowed(values.tolist(), dtype)
    got = torch.from_numpy(np.array(words, dtype=np.uint32).view(np.int16)).view(kind)
    assert torch.equal(got, want)
    assert intrinsics.widened(words, dtype) == [np.float32(v) for v in want.float().tolist()]
