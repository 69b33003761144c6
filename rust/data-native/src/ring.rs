//! `Ring`: slots in shared memory, for the owner and for workers.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use loongforge_ring::ring::{Ring as Core, Shape};
use loongforge_ring::sync::Ordering;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::board::Board;
use crate::errors::{seconds, to_python};
use crate::lease::{Lease, SlotView};

/// A ring of slots and a board of jobs in anonymous shared memory.
#[pyclass(frozen, module = "loongforge_data._core")]
pub struct Ring(Arc<Core>);

#[pymethods]
impl Ring {
    #[new]
    #[pyo3(signature = (*, slots, slot_bytes, items, jobs, payload, workers))]
    fn new(
        slots: u32,
        slot_bytes: u64,
        items: u32,
        jobs: u32,
        payload: u32,
        workers: u32,
    ) -> PyResult<Self> {
        let shape = Shape {
            slots,
            items,
            jobs,
            payload,
            workers,
            slot_bytes,
        };
        Core::create(shape)
            .map(|core| Self(Arc::new(core)))
            .map_err(to_python)
    }

    /// Joins a ring by its descriptor; the descriptor stays open and is not taken over.
    #[staticmethod]
    fn attach(fd: i32) -> PyResult<Self> {
        // SAFETY: plain system call; the result is checked.
        let copy = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0) };
        if copy < 0 {
            return Err(std::io::Error::last_os_error().into());
        }
        // SAFETY: a fresh descriptor that nobody else owns.
        let owned = unsafe { OwnedFd::from_raw_fd(copy) };
        Core::attach(owned)
            .map(|core| Self(Arc::new(core)))
            .map_err(to_python)
    }

    fn fileno(&self) -> i32 {
        self.0.fd().as_raw_fd()
    }

    #[getter]
    fn slots(&self) -> u32 {
        self.0.shape().slots
    }

    #[getter]
    fn slot_bytes(&self) -> u64 {
        self.0.shape().slot_bytes
    }

    /// The jobs that travel with this ring.
    fn board(&self) -> Board {
        Board(Arc::clone(&self.0))
    }

    fn begin(&self, slot: usize, sequence: u64, items: usize, size: usize) -> PyResult<()> {
        self.0.begin(slot, sequence, items, size).map_err(to_python)
    }

    fn reserve(&self, py: Python<'_>, slot: usize, size: usize) -> PyResult<()> {
        py.detach(|| self.0.reserve(slot, size)).map_err(to_python)
    }

    fn wants(&self, slot: usize, sequence: u64, item: usize) -> PyResult<bool> {
        Ok(self.0.slot(slot).map_err(to_python)?.wants(sequence, item))
    }

    fn mark(&self, slot: usize, sequence: u64, item: usize, value: u8) -> PyResult<bool> {
        self.0.mark(slot, sequence, item, value).map_err(to_python)
    }

    /// Marks of a slot's items: 0 pending, 1 stored, 2 failed.
    fn marks<'py>(&self, py: Python<'py>, slot: usize) -> PyResult<Bound<'py, PyBytes>> {
        let slot = self.0.slot(slot).map_err(to_python)?;
        let items = slot.head.items.load(Ordering::Acquire) as usize;
        let marks: Vec<u8> = slot.marks[..items]
            .iter()
            .map(|m| m.load(Ordering::Acquire))
            .collect();
        Ok(PyBytes::new(py, &marks))
    }

    fn state(&self, slot: usize) -> PyResult<String> {
        Ok(format!("{:?}", self.0.slot(slot).map_err(to_python)?.state()).to_lowercase())
    }

    /// States of all slots, one byte each: 0 free, 1 filling, 2 ready, 3 in use.
    fn states<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.states())
    }

    /// Bytes of a slot for which memory was taken.
    fn reserved(&self, slot: usize) -> PyResult<u64> {
        self.0.reserved(slot).map_err(to_python)
    }

    /// Seconds from the start of filling until the slot was ready.
    fn fill_seconds(&self, slot: usize) -> PyResult<f64> {
        let slot = self.0.slot(slot).map_err(to_python)?;
        let (began, ready) = (&slot.head.began, &slot.head.ready);
        let nanoseconds = ready
            .load(Ordering::Acquire)
            .saturating_sub(began.load(Ordering::Acquire));
        Ok(nanoseconds as f64 * 1e-9)
    }

    fn settle(&self, slot: usize) -> PyResult<bool> {
        self.0.settle(slot).map_err(to_python)
    }

    fn abandon(&self, slot: usize) -> PyResult<()> {
        self.0
            .slot(slot)
            .map(|slot| slot.abandon())
            .map_err(to_python)
    }

    fn shrink(&self, slot: usize) -> PyResult<()> {
        self.0.shrink(slot).map_err(to_python)
    }

    /// Waits for a slot and takes it. None when the time is over.
    fn take(
        &self,
        py: Python<'_>,
        slot: usize,
        sequence: u64,
        timeout: f64,
    ) -> PyResult<Option<Lease>> {
        let timeout = seconds(timeout)?;
        let core = &self.0;
        let taken = py
            .detach(|| core.take(slot, sequence, timeout))
            .map_err(to_python)?;
        Ok(taken.then(|| Lease::new(Arc::clone(core), slot)))
    }

    /// Bytes of a slot, for the process that fills it.
    fn view(&self, slot: usize) -> PyResult<SlotView> {
        SlotView::new(Arc::clone(&self.0), slot).map_err(to_python)
    }

    fn wait_progress(&self, py: Python<'_>, seen: u32, timeout: f64) -> PyResult<u32> {
        let timeout = seconds(timeout)?;
        let core = &self.0;
        Ok(py.detach(|| core.wait_progress(seen, timeout)))
    }

    fn stop(&self) {
        self.0.stop();
    }

    fn stopped(&self) -> bool {
        self.0.stopped()
    }

    fn count(&self, worker: usize, counter: usize, amount: u64) {
        self.0.count(worker, counter, amount);
    }

    fn counters(&self, worker: usize) -> Vec<u64> {
        self.0.counters(worker).to_vec()
    }
}
