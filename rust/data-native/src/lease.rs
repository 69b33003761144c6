//! Python buffers over the bytes of a slot.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use loongforge_ring::ring::Ring;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

/// Fills a buffer request with the bytes of a slot.
///
/// # Safety
/// `view` is the live request that Python passed to `__getbuffer__` of `owner`; `owner` keeps `ring` alive.
unsafe fn export(
    owner: &Bound<'_, PyAny>,
    ring: &Ring,
    slot: usize,
    view: *mut ffi::Py_buffer,
    flags: c_int,
) -> PyResult<()> {
    let (base, len) = ring.bytes(slot).map_err(crate::errors::to_python)?;
    let len = ffi::Py_ssize_t::try_from(len)
        .map_err(|_| PyBufferError::new_err("the slot is too large"))?;
    // SAFETY: by contract; the mapping lives as long as `owner`, whose reference the view takes.
    let code = unsafe {
        ffi::PyBuffer_FillInfo(
            view,
            owner.as_ptr(),
            base.as_ptr().cast::<c_void>(),
            len,
            0,
            flags,
        )
    };
    if code == 0 {
        Ok(())
    } else {
        Err(PyErr::fetch(owner.py()))
    }
}

/// Writable bytes of a slot that is being filled.
#[pyclass(frozen, module = "loongforge_data._core")]
pub struct SlotView {
    ring: Arc<Ring>,
    slot: usize,
}

impl SlotView {
    pub fn new(ring: Arc<Ring>, slot: usize) -> loongforge_ring::Result<Self> {
        let _ = ring.slot(slot)?;
        Ok(Self { ring, slot })
    }
}

#[pymethods]
impl SlotView {
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let this = slf.get();
        // SAFETY: the request comes from Python for this object.
        unsafe { export(slf.as_any(), &this.ring, this.slot, view, flags) }
    }
}

/// A slot in use by the reader. It goes back to the ring when this object and all arrays over it are gone.
#[pyclass(frozen, module = "loongforge_data._core")]
pub struct Lease {
    ring: Arc<Ring>,
    slot: usize,
    process: u32,
}

impl Lease {
    pub fn new(ring: Arc<Ring>, slot: usize) -> Self {
        Self {
            ring,
            slot,
            process: std::process::id(),
        }
    }
}

#[pymethods]
impl Lease {
    #[getter]
    fn slot(&self) -> usize {
        self.slot
    }

    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let this = slf.get();
        // SAFETY: the request comes from Python for this object.
        unsafe { export(slf.as_any(), &this.ring, this.slot, view, flags) }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // A child that was forked meanwhile has a copy of this object, but the slot is not its to give back.
        if self.process == std::process::id()
            && let Ok(slot) = self.ring.slot(self.slot)
        {
            let _ = slot.release();
        }
    }
}
