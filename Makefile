# Every target sets up all it needs: uv, the locked environment, the Rust parts.
.DEFAULT_GOAL := help
PY := .venv/bin/python
PACKAGES := loongforge_comm loongforge_mem loongforge_data loongforge_fuse loongforge
DATASET ?=
# Every interleaving of the ring's protocol, in a target folder of its own: the flag changes all crates.
LOOM := RUSTFLAGS="--cfg loom" cargo test --quiet --manifest-path rust/Cargo.toml -p loongforge-ring --release \
	--test loom --target-dir rust/target/loom --locked
export OMP_NUM_THREADS ?= 1

.PHONY: help setup demo test test-slow test-gpu test-wheels test-rust lint lint-types format bench docs clean

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 22

setup:
	@./scripts/setup.sh

demo: setup  ## train the tiny VLA on made robot video (or DATASET=dir) on the CPU, in about two minutes
	@OMP_NUM_THREADS=$$(nproc) $(PY) scripts/demo.py $(if $(DATASET),--dataset "$(DATASET)")

test: setup  ## the whole fast suite: Rust, then Python
	@cargo test --quiet --manifest-path rust/Cargo.toml --workspace --locked
	@$(LOOM)
	@$(PY) -m pytest -q -n 2 --dist worksteal -m "not slow and not gpu"

test-slow: setup  ## long tests: whole-file decodes, chaos, wheels in empty environments
	@$(PY) -m pytest -q -m "slow and not gpu" --timeout 1200

test-gpu: setup  ## tests that need an NVIDIA GPU
	@$(PY) -m pytest -q -m gpu

test-wheels: setup  ## each pillar's wheel alone in an empty environment, its own tests there
	@$(PY) -m pytest -q tests/test_wheels_alone.py -m slow --timeout 1800

test-rust: setup
	@cargo test --manifest-path rust/Cargo.toml --workspace --locked
	@$(LOOM)

lint: setup  ## ruff, mypy, rustfmt, clippy
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(MAKE) -s lint-types
	@cargo fmt --manifest-path rust/Cargo.toml --all --check
	@cargo clippy --quiet --manifest-path rust/Cargo.toml --workspace --all-targets --locked -- -D warnings

lint-types:
	@$(PY) -m mypy $(addprefix -p ,$(PACKAGES))

format: setup
	@$(PY) -m ruff check --fix-only .
	@$(PY) -m ruff format .
	@cargo fmt --manifest-path rust/Cargo.toml --all

bench: setup  ## the benchmarks that need no GPU; results in benchmarks/results/cpu, then docs
	@$(PY) scripts/bench.py
	@$(PY) scripts/performance.py

docs: setup  ## regenerate docs/performance.md from benchmarks/results
	@$(PY) scripts/performance.py

clean:
	@rm -rf .venv .tools rust/target runs
