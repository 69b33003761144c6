"""Kernels compile for three architectures without a GPU and keep their limits; the store finds them again."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from dataclasses import replace

import pytest

pytest.importorskip("numba.cuda", reason="needs numba-cuda to compile kernels")

from loongforge_fuse.__main__ import main
from loongforge_fuse.kernels import driver, launcher, store
from loongforge_fuse.kernels.catalog import FAMILIES, TUNED_FOR, catalog
from loongforge_fuse.kernels.command import gate
from loongforge_fuse.kernels.compiler import CompiledKernel, KernelCompileError, compile_kernel
from loongforge_fuse.kernels.specs import ARCHITECTURES, SOURCE, KernelSpec, source_modules


def sample() -> list[KernelSpec]:
    """One variant of every maker: the bf16 one with most options on."""
    chosen: dict[str, KernelSpec] = {}
    for spec in (*catalog(), *catalog("tuning")):
        score = (
            "bf16" in spec.options.values(),
            spec.options.get("threads", 0) in (32, 256),
            sum(v is True for v in spec.options.values()),
        )
        best = chosen.get(spec.maker)
        if best is None or score > rank[spec.maker]:
            chosen[spec.maker] = spec
            rank[spec.maker] = score
    return list(chosen.values())


rank: dict[str, tuple] = {}
SAMPLE = sample()


@pytest.fixture(scope="session")
def compiled():
    """Compile a kernel once in a test session, however many tests look at it."""
    done: dict[tuple[str, str], CompiledKernel] = {}

    def get(spec: KernelSpec, arch: str) -> CompiledKernel:
        key = (spec.name, arch)
        if key not in done:
            done[key] = compile_kernel(spec, arch)
        return done[key]

    return get


@pytest.mark.parametrize("spec", SAMPLE, ids=lambda s: s.maker)
def test_one_variant_of_each_kernel_passes_the_gate(spec, compiled):
    assert gate(compiled(spec, TUNED_FOR)) == []


@pytest.mark.slow
@pytest.mark.parametrize("arch", [a for a in ARCHITECTURES if a != TUNED_FOR])
@pytest.mark.parametrize("spec", SAMPLE, ids=lambda s: s.maker)
def test_one_variant_of_each_kernel_passes_the_gate_elsewhere(spec, arch, compiled):
    if not spec.runs_on(arch):
        pytest.skip(f"needs compute capability {spec.capability / 10}")
    assert gate(compiled(spec, arch)) == []


@pytest.mark.parametrize(
    ("arch", "block", "registers", "fits"),
    [
        ("sm_90", 256, 224, True),
        ("sm_90", 256, 225, False),
        ("sm_90", 1024, 64, True),
        ("sm_90", 1024, 65, False),
        ("sm_80", 256, 233, True),
        ("sm_80", 320, 201, False),
        ("sm_80", 128, 256, False),
    ],
)
def test_the_gate_lets_no_block_pass_that_cannot_be_launched(arch, block, registers, fits, compiled):
    kernel = compiled(SAMPLE[0], TUNED_FOR)
    report = replace(kernel.report, registers=registers)
    changed = replace(kernel, arch=arch, spec=replace(kernel.spec, block=block), report=report)
    assert (gate(changed) == []) == fits


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_kernel_passes_the_gate(family, arch):
    found = {spec.name: gate(compile_kernel(spec, arch)) for spec in catalog(family) if spec.runs_on(arch)}
    assert {name: problems for name, problems in found.items() if problems} == {}


def test_every_maker_is_in_the_sample():
    makers = {spec.maker for family in FAMILIES for spec in catalog(family)}
    assert {spec.maker for spec in SAMPLE} == makers


def test_catalog_names_are_unique_and_short_enough_for_files():
    names = [s.name for s in catalog()]
    assert len(set(names)) == len(names)
    assert max(len(store.file_name(s, "sm_100")) for s in catalog()) < 200
    with pytest.raises(ValueError, match="unknown kernel family 'x'"):
        catalog("x")


def test_a_half_vector_is_one_access_and_a_float_vector_two(compiled):
    from loongforge_fuse.ops.elementwise import elementwise_spec

    spec = elementwise_spec("cast_scale", x="f32", y="bf16", vector=True, count_bad=True, device_scale=False)
    report = compiled(spec, "sm_90").report
    assert (report.vector_loads, report.vector_stores) == (2, 1)
    assert report.double_operations == report.spill_bytes == report.stack_bytes == 0


def test_a_kernel_that_is_wrong_names_itself():
    spec = KernelSpec(module="elementwise", maker="silu_mul_forward", options={"x": "bf16"}, arguments="PPPq")
    with pytest.raises(KernelCompileError, match="silu_mul_forward"):
        compile_kernel(spec, "sm_90")
    with pytest.raises(ValueError, match="arch must look like 'sm_90', got 'hopper'"):
        compile_kernel(spec, "hopper")


def test_kernels_of_newer_instructions_are_built_where_there_are_some(tmp_path, monkeypatch, capsys):
    spec = next(s for s in catalog("float8") if s.options["x"] == "bf16")
    assert [arch for arch in ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100") if spec.runs_on(arch)] == [
        "sm_89", "sm_90", "sm_100",
    ]  # fmt: skip
    monkeypatch.setenv("LOONGFORGE_CACHE_DIR", str(tmp_path))
    assert main(["kernels", "build", "--arch", "sm_80", "--match", spec.name, "--out", str(tmp_path)]) == 0
    assert "0 compiled, 0 with problems" in capsys.readouterr().out
    with pytest.raises(KernelCompileError, match=r"needs compute capability 8\.9, sm_80 is below it"):
        compile_kernel(spec, "sm_80")
    monkeypatch.setattr(driver, "architecture", lambda device: "sm_80")
    with pytest.raises(launcher.KernelUnavailableError, match=r"capability 8\.9, this GPU has 8\.0"):
        launcher.function(spec, 77)


def test_quantising_converts_four_values_by_two_instructions_and_divides_without_a_branch(compiled):
    from loongforge_fuse.ops.quantise_plan import plan_of, quantise_spec

    for width, activation in ((2048, "none"), (4304, "gelu_tanh"), (6144, "silu_mul")):
        plan = plan_of(width, activation)
        kernel = compiled(quantise_spec(plan, width, "bf16", activation), TUNED_FOR)
        assert gate(kernel) == []
        inputs = 2 if activation == "silu_mul" else 1
        assert kernel.report.vector_loads == inputs * plan.vectors
        assert kernel.ptx.count("cvt.rn.satfinite.e4m3x2.f32") == 4 * plan.vectors
        assert kernel.ptx.count("div.rn") == 0
        assert kernel.report.registers <= 65536 // (plan.min_blocks * plan.block)


def test_build_writes_cubins_that_are_found_without_numba(tmp_path, monkeypatch):
    monkeypatch.setenv("LOONGFORGE_CACHE_DIR", str(tmp_path / "cache"))
    assert main(["kernels", "build", "--arch", "sm_90", "--match", "philox", "--out", str(tmp_path)]) == 0
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["format_version"] == 1
    assert [k["name"] for k in manifest["kernels"]] == ["philox_tick_b32"]
    code = (
        "import sys\n"
        "from loongforge_fuse.kernels import store\n"
        "from loongforge_fuse.ops.dropout import tick_spec\n"
        "assert store.find(tick_spec(), 'sm_90')[:4] == b'\\x7fELF'\n"
        "assert store.find(tick_spec(), 'sm_80') is None\n"
        "sys.exit(any(n.split('.')[0] == 'numba' for n in sys.modules))\n"
    )
    environment = dict(os.environ, LOONGFORGE_CUBIN_DIR=str(tmp_path))
    assert (
        subprocess.run([sys.executable, "-c", code], env=environment, timeout=120, check=False).returncode
        == 0
    )


def test_a_second_build_keeps_what_the_manifest_says_of_the_first(tmp_path, compiled):
    from loongforge_fuse.ops.dropout import tick_spec
    from loongforge_fuse.ops.elementwise import elementwise_spec

    first = compiled(tick_spec(), "sm_90")
    second = compiled(elementwise_spec("silu_mul_forward", x="bf16", vector=True), "sm_90")
    gone = compiled(elementwise_spec("silu_mul_forward", x="bf16", vector=False), "sm_90")
    for kernels in ((first, gone), (second,)):
        for kernel in kernels:
            store.save(kernel, tmp_path)
        store.write_manifest(kernels, tmp_path)
        (tmp_path / store.file_name(gone.spec, "sm_90")).unlink(missing_ok=True)
    names = {k["name"] for k in json.loads((tmp_path / "manifest.json").read_text())["kernels"]}
    assert names == {first.spec.name, second.spec.name}
    (tmp_path / "manifest.json").write_text("{")
    store.write_manifest((second,), tmp_path)
    assert len(json.loads((tmp_path / "manifest.json").read_text())["kernels"]) == 1


def test_a_changed_source_does_not_match_an_old_cubin(tmp_path, monkeypatch):
    from loongforge_fuse.kernels import specs
    from loongforge_fuse.ops.dropout import tick_spec

    monkeypatch.setenv("LOONGFORGE_CUBIN_DIR", str(tmp_path))
    monkeypatch.setenv("LOONGFORGE_CACHE_DIR", str(tmp_path / "cache"))
    store.save(compile_kernel(tick_spec(), "sm_90"), tmp_path)
    assert store.find(tick_spec(), "sm_90") is not None
    monkeypatch.setattr(specs, "_source_text_hash", lambda module: "another")
    assert store.find(tick_spec(), "sm_90") is None


def test_check_reports_success_in_its_exit_code(capsys):
    assert main(["kernels", "list", "--arch", "sm_90", "--match", "philox"]) == 0
    assert "registers" in capsys.readouterr().out
    assert main(["kernels", "check", "--arch", "sm_90", "--match", "philox"]) == 0


def test_no_cubin_and_no_compiler_is_a_reason_not_a_crash(tmp_path, monkeypatch):
    from loongforge_fuse.ops.dropout import tick_spec

    monkeypatch.setenv("LOONGFORGE_KERNEL_COMPILE", "0")
    with pytest.raises(launcher.KernelUnavailableError, match="LOONGFORGE_KERNEL_COMPILE=0"):
        launcher._compile(tick_spec(), "sm_90")


def test_arguments_are_packed_at_their_natural_alignment():
    layout, places, size = driver._layout("PifqPf")
    assert places == (64, 72, 76, 80, 88, 96)
    buffer = bytearray(size)
    layout.pack_into(buffer, 0, 1, 2, 1, 256, 1, 1, 0, 77, 0, 0, 10, 11, 1.5, 12, 13, 2.5)
    assert struct.unpack_from("7I", buffer) == (1, 2, 1, 256, 1, 1, 0)
    assert struct.unpack_from("Q", buffer, 32) == (77,)
    assert struct.unpack_from("Qif", buffer, 64) == (10, 11, 1.5)
    assert struct.unpack_from("qQf", buffer, 80) == (12, 13, 2.5)


def test_a_launch_that_may_start_early_says_so_in_one_attribute():
    # CUlaunchAttribute: the id (6: programmatic stream serialisation), padding, a value of 64 bytes.
    assert len(driver._FOLLOWS) == 72
    assert struct.unpack_from("I4xI", driver._FOLLOWS) == (6, 1)
    layout, _, size = driver._layout("P")
    buffer = bytearray(size)
    layout.pack_into(buffer, 0, 1, 2, 1, 256, 1, 1, 0, 77, 4096, 1, 10)
    assert struct.unpack_from("QI", buffer, 40) == (4096, 1)


def test_the_hash_of_a_kernel_covers_every_module_it_imports():
    modules = {spec.module: source_modules(spec.module) for spec in SAMPLE}
    assert modules["rope"] == ("barriers", "common", "intrinsics", "lowering", "rope")
    assert "norm_forward" in modules["norm_backward"]
    for path in SOURCE.glob("*.py"):
        if path.stem != "__init__":
            assert any(path.stem in found for found in modules.values()), path.stem


def test_a_machine_without_a_driver_gets_a_clear_error(monkeypatch):
    driver._library.cache_clear()
    monkeypatch.setattr(driver.ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError(name)))
    try:
        with pytest.raises(driver.DriverError, match="need an NVIDIA driver"):
            driver._library()
    finally:
        driver._library.cache_clear()


def test_index_logic_runs_in_the_simulator_and_covers_every_pixel_once():
    code = """
import numpy as np
from numba import cuda
from loongforge_fuse.kernels.source.indexing import patch_element, source_pixel

@cuda.jit
def twin(out, patch, channels, last):
    k = cuda.grid(1)
    if k < out.shape[0]:
        out[k, 0], out[k, 1], out[k, 2] = patch_element(k, patch, channels, last)

for patch in (14, 16):
    for last in (True, False):
        out = np.zeros((patch * patch * 3, 3), dtype=np.int64)
        twin[(out.shape[0] + 63) // 64, 64](out, patch, 3, last)
        order = (patch, patch, 3) if last else (3, patch, patch)
        want = np.stack(np.unravel_index(np.arange(out.shape[0]), order), 1)
        want = want if last else want[:, [1, 2, 0]]
        assert (out == want).all(), (patch, last)
"""
    environment = dict(os.environ, NUMBA_ENABLE_CUDASIM="1")
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        timeout=170,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
