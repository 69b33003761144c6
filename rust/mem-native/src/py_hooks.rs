//! Set-up of the process-wide allocator: hooks, errors, driver, page locking.

use std::sync::atomic::Ordering;

use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::global::{self, GlobalConfig, TIMING};
use crate::parts::{heap_config, source};
use crate::stats::to_python;
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

/// Time every call (about 50 ns a call) or none.
#[pyfunction]
pub fn set_timing(on: bool) {
    TIMING.store(on, Ordering::Relaxed);
}

/// Page-lock host memory for fast copies.
#[pyfunction]
pub fn host_register(py: Python<'_>, address: usize, nbytes: usize) -> PyResult<()> {
    py.detach(|| {
        let d = driver::driver().map_err(PyOSError::new_err)?;
        // SAFETY: the caller owns the range; 1: usable from every context.
        let status = unsafe { (d.host_register)(address as *mut _, nbytes, 1) };
        driver::check("cuMemHostRegister", status).map_err(to_python)
    })
}

/// Undo [`host_register`].
#[pyfunction]
pub fn host_unregister(address: usize) -> PyResult<()> {
    let d = driver::driver().map_err(PyOSError::new_err)?;
    // SAFETY: the range was registered before.
    driver::check("cuMemHostUnregister", unsafe {
        (d.host_unregister)(address as *mut _)
    })
    .map_err(to_python)
}
