#!/bin/sh
# Prepare a checkout: find the tools, install uv when absent, sync the locked workspace (builds the Rust parts).
# Every missing tool costs one clear line that names the remedy.
set -eu
cd "$(dirname "$0")/.."

fail() { printf 'setup: %s\n' "$1" >&2; exit 1; }

[ "$(uname -s)-$(uname -m)" = "Linux-x86_64" ] ||
    fail "this is $(uname -s)-$(uname -m); LoongForge supports Linux on x86-64"
command -v git >/dev/null 2>&1 || fail "git is missing; install it (Debian: apt-get install git)"
command -v cc >/dev/null 2>&1 || command -v gcc >/dev/null 2>&1 ||
    fail "no C compiler (cc) on PATH; install one (Debian: apt-get install build-essential)"
command -v cargo >/dev/null 2>&1 ||
    fail "cargo is missing; install a Rust toolchain >= 1.88 from https://rustup.rs and open a new shell"
rust=$(cargo --version 2>&1) ||
    fail "cargo does not run ($(printf '%s' "$rust" | head -n 1)); with an empty HOME set RUSTUP_HOME and CARGO_HOME to the toolchain's folders"
minor=$(printf '%s' "$rust" | sed -n 's/^cargo 1\.\([0-9]*\)\..*/\1/p')
[ -n "$minor" ] && [ "$minor" -ge 88 ] ||
    fail "found '$rust', need Rust >= 1.88; run: rustup update stable"

python=${UV_PYTHON:-}
if [ -z "$python" ]; then
    for candidate in python3.11 python3.12 python3.13 python3; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' >/dev/null 2>&1; then
            python=$("$candidate" -c 'import sys; print(sys.executable)')
            break
        fi
    done
fi
[ -n "$python" ] || fail "no CPython 3.11, 3.12 or 3.13 on PATH; install one (Debian: apt-get install python3 python3-venv)"
export UV_PYTHON="$python"

# Companies that inspect TLS put their own root certificate into the system store: use that store where it exists.
[ -e /etc/ssl/certs/ca-certificates.crt ] && export UV_SYSTEM_CERTS="${UV_SYSTEM_CERTS:-1}"

if command -v uv >/dev/null 2>&1; then
    uv=uv
else
    uv=.tools/bin/uv
    if [ ! -x "$uv" ]; then
        echo "setup: installing uv into .tools" >&2
        "$python" -m venv .tools >/dev/null 2>&1 && .tools/bin/python -m pip install --quiet 'uv>=0.9' >&2 ||
            fail "could not install uv; install it by hand (python3 -m pip install uv) and run again"
    fi
fi
# The environment holds torch: say how long the first sync takes before it goes quiet.
[ -d .venv ] || echo "setup: first sync downloads PyTorch (about 3 GB) and builds the Rust parts; a few minutes" >&2
"$uv" sync --quiet --locked --all-packages --group dev
mkdir -p .tools
printf '%s\n' "$(command -v "$uv")" > .tools/uv-path
