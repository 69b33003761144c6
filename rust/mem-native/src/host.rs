//! Host memory of exact size: one mapping, best fit at 4 KiB, no rounding to powers of two.

use std::sync::{Mutex, MutexGuard, PoisonError};

use loongforge_pool::error::PoolError;
use loongforge_pool::hash::AddressMap;
use loongforge_pool::runs::RunIndex;
use pyo3::exceptions::{PyMemoryError, PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use crate::driver::{check, driver};
use crate::stats::to_python;

/// Smallest granted size in bytes.
const PAGE: u64 = 4096;

#[derive(Debug)]
struct State {
    base: u64,
    bytes: u64,
    runs: RunIndex,
    live: AddressMap<(u32, u64)>,
    requested: u64,
    pinned: bool,
}

/// One mapping cut into page-aligned blocks. Blocks never move; the mapping ends with the object or with `close`.
#[pyclass(module = "loongforge_mem._core", frozen)]
pub struct HostArena {
    state: Mutex<State>,
}

impl HostArena {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl HostArena {
    #[new]
    fn new(nbytes: u64) -> PyResult<Self> {
        let bytes = nbytes;
        if bytes == 0 || bytes > u64::from(u32::MAX) * PAGE {
            return Err(PyValueError::new_err(format!(
                "an arena of {bytes} bytes is outside 1..={}",
                u64::from(u32::MAX) * PAGE
            )));
        }
        let bytes = bytes.div_ceil(PAGE) * PAGE;
        // SAFETY: an anonymous mapping with no fixed address touches no memory of ours.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes as usize,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if at == libc::MAP_FAILED {
            return Err(PyMemoryError::new_err(format!(
                "the kernel has no {bytes} bytes for a host arena"
            )));
        }
        let mut runs = RunIndex::new((bytes / PAGE) as u32);
        runs.give(0, (bytes / PAGE) as u32);
        let state = State {
            base: at as u64,
            bytes,
            runs,
            live: AddressMap::default(),
            requested: 0,
            pinned: false,
        };
        Ok(Self {
            state: Mutex::new(state),
        })
    }

    /// Page-lock the mapping for fast copies; the lock ends with the mapping.
    fn pin(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| {
            let mut s = self.lock();
            if s.base == 0 {
                return Err(PyRuntimeError::new_err("the host arena is closed"));
            }
            if s.pinned {
                return Ok(());
            }
            let d = driver().map_err(PyOSError::new_err)?;
            // SAFETY: our own mapping; 1: usable from every context.
            let status = unsafe { (d.host_register)(s.base as *mut _, s.bytes as usize, 1) };
            check("cuMemHostRegister", status).map_err(to_python)?;
            s.pinned = true;
            Ok(())
        })
    }

    /// Whether the mapping is page-locked.
    #[getter]
    fn pinned(&self) -> bool {
        self.lock().pinned
    }

    /// Address of a new block of at least `size` bytes.
    fn alloc(&self, size: u64) -> PyResult<u64> {
        let mut s = self.lock();
        let (free, largest) = (
            s.runs.free_units() * PAGE,
            u64::from(s.runs.largest()) * PAGE,
        );
        if s.base == 0 {
            return Err(PyRuntimeError::new_err("the host arena is closed"));
        }
        if size == 0 {
            return Err(to_python(PoolError::BadSize { size, max: s.bytes }));
        }
        let pages = u32::try_from(size.div_ceil(PAGE)).ok();
        let Some((start, pages)) = pages.and_then(|p| s.runs.take(p).map(|start| (start, p)))
        else {
            return Err(to_python(PoolError::OutOfMemory {
                size,
                free,
                largest,
            }));
        };
        let address = s.base + u64::from(start) * PAGE;
        s.live.insert(address, (pages, size));
        s.requested += size;
        Ok(address)
    }

    /// Give a block back.
    fn free(&self, address: u64) -> PyResult<()> {
        let mut s = self.lock();
        let (pages, size) = s
            .live
            .remove(&address)
            .ok_or_else(|| to_python(PoolError::UnknownBlock { address }))?;
        let start = ((address - s.base) / PAGE) as u32;
        s.runs.give(start, pages);
        s.requested -= size;
        Ok(())
    }

    /// First address and bytes of the mapping.
    #[getter]
    fn range(&self) -> (u64, u64) {
        let s = self.lock();
        (s.base, s.bytes)
    }

    /// Requested bytes of live blocks.
    #[getter]
    fn requested(&self) -> u64 {
        self.lock().requested
    }

    /// Live blocks.
    #[getter]
    fn blocks(&self) -> usize {
        self.lock().live.len()
    }

    /// Unmap; refused while blocks are live.
    fn close(&self) -> PyResult<()> {
        let mut s = self.lock();
        if !s.live.is_empty() {
            let text = format!(
                "{} blocks of the host arena are still in use; free them first",
                s.live.len()
            );
            return Err(PyRuntimeError::new_err(text));
        }
        unmap(&mut s);
        Ok(())
    }
}

fn unmap(s: &mut State) {
    if s.base != 0 {
        if s.pinned
            && let Ok(d) = driver()
        {
            // SAFETY: registered by `pin`. Pages that stay locked in a driver after they are unmapped would make the
            // next mapping at this address fail; an error here means that the driver is gone already.
            unsafe { (d.host_unregister)(s.base as *mut _) };
            s.pinned = false;
        }
        // SAFETY: our own mapping, and no block of it is live.
        unsafe { libc::munmap(s.base as *mut _, s.bytes as usize) };
        s.base = 0;
    }
}

impl Drop for HostArena {
    fn drop(&mut self) {
        let mut s = self.lock();
        // A live block means a tensor still reads the memory: it stays mapped until the process ends.
        if s.live.is_empty() {
            unmap(&mut s);
        }
    }
}
