//! Set-up of the process-wide allocator: hooks, errors, driver, page locking.

use std::sync::atomic::Ordering;

use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::global::{self, GlobalConfig, TIMING};
use crate::parts::{heap_config, source};
use crate::{cabi, driver, oom};

/// Addresses of the C functions by the name of the torch setter they belong to.
#[pyfunction]
pub fn c_abi(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let out = PyDict::new(py);
    for (name, address) in cabi::table() {
        out.set_item(name, address)?;
    }
    Ok(out)
}

/// Why the CUDA driver cannot be opened, or None when it can.
#[pyfunction]
pub fn driver_error() -> Option<String> {
    driver::driver().err()
}

/// Configure the heaps of the process.
#[pyfunction]
#[pyo3(signature = (source_name, *, initial_bytes, grow_bytes, limit_bytes=None,
                    slab_max=loongforge_pool::SLAB_MAX))]
pub fn configure(
    source_name: &str,
    initial_bytes: u64,
    grow_bytes: u64,
    limit_bytes: Option<u64>,
    slab_max: u64,
) -> PyResult<()> {
    let heap = heap_config(initial_bytes, grow_bytes, limit_bytes, slab_max);
    global::configure(GlobalConfig {
        source: source(source_name)?,
        heap,
    })
    .map_err(PyOSError::new_err)
}

/// Tell where torch's error function is.
#[pyfunction]
pub fn set_check_fail(address: usize) {
    oom::set_check_fail(address);
}

/// Tell how to throw torch's out-of-memory error: addresses of a constructor, the virtual table that replaces the one of
/// a base (or 0), the type information, `__cxa_allocate_exception`, `__cxa_throw`, `operator new`, `operator delete`.
#[pyfunction]
pub fn set_oom_thrower(addresses: Option<[usize; 7]>) {
    oom::set_thrower(addresses.map(
        |[constructor, vtable, typeinfo, allocate, throw, new, delete]| oom::Thrower {
            constructor,
            vtable,
            typeinfo,
            allocate,
            throw,
            new,
            delete,
        },
    ));
}

/// Time every call (about 50 ns a call) or none.
#[pyfunction]
pub fn set_timing(on: bool) {
    TIMING.store(on, Ordering::Relaxed);
}
