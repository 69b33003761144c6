//! `Ring`: slots and jobs in shared memory, for the owner and for workers.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use loongforge_ring::protocol::job;
use loongforge_ring::ring::{NO_SLOT, Ring as Core, Shape};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors::to_python;
use crate::lease::{Lease, SlotView};

/// (serial, worker, seconds since it was claimed)
type Held = (u64, u32, f64);

fn seconds(timeout: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(timeout).map_err(|_| {
        PyValueError::new_err(format!(
            "timeout is {timeout}, allowed is a number of seconds >= 0"
        ))
    })
}

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
        let items = slot
            .head
            .items
            .load(loongforge_ring::sync::Ordering::Acquire) as usize;
        let marks: Vec<u8> = slot.marks[..items]
            .iter()
            .map(|m| m.load(loongforge_ring::sync::Ordering::Acquire))
            .collect();
        Ok(PyBytes::new(py, &marks))
    }

    fn state(&self, slot: usize) -> PyResult<String> {
        Ok(format!("{:?}", self.0.slot(slot).map_err(to_python)?.state()).to_lowercase())
    }

    /// Seconds from the start of filling until the slot was ready.
    fn fill_seconds(&self, slot: usize) -> PyResult<f64> {
        let slot = self.0.slot(slot).map_err(to_python)?;
        let order = loongforge_ring::sync::Ordering::Acquire;
        let nanoseconds = slot
            .head
            .ready
            .load(order)
            .saturating_sub(slot.head.began.load(order));
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

    #[pyo3(signature = (payload, waits_for=None))]
    fn push(&self, payload: &[u8], waits_for: Option<u32>) -> PyResult<Option<u64>> {
        self.0
            .push(payload, waits_for.unwrap_or(NO_SLOT))
            .map_err(to_python)
    }

    fn wake_workers(&self) {
        self.0.wake_workers();
    }

    /// Waits for a job and claims it: (entry, serial, payload), or None when the time is over or the ring stops.
    fn claim<'py>(
        &self,
        py: Python<'py>,
        worker: u32,
        timeout: f64,
    ) -> PyResult<Option<(usize, u64, Bound<'py, PyBytes>)>> {
        let timeout = seconds(timeout)?;
        let core = &self.0;
        let claim = py
            .detach(|| core.claim(worker, timeout))
            .map_err(to_python)?;
        Ok(claim.map(|c| (c.entry, c.serial, PyBytes::new(py, &c.payload))))
    }

    #[pyo3(signature = (worker, entry, error=None))]
    fn finish(&self, worker: u32, entry: usize, error: Option<&[u8]>) -> PyResult<()> {
        self.0.finish(worker, entry, error).map_err(to_python)
    }

    /// Removes ended jobs; returns (serial, error) of the failed ones.
    fn collect<'py>(&self, py: Python<'py>) -> Vec<(u64, Bound<'py, PyBytes>)> {
        let failed = self
            .0
            .collect()
            .into_iter()
            .filter(|report| report.kind == job::FAILED);
        failed
            .map(|report| (report.serial, PyBytes::new(py, &report.payload)))
            .collect()
    }

    fn claimed(&self) -> Vec<Held> {
        self.0
            .claimed()
            .into_iter()
            .map(|r| (r.serial, r.worker, r.age as f64 * 1e-9))
            .collect()
    }

    fn requeue(&self, worker: u32) -> usize {
        self.0.requeue(worker)
    }

    fn clear_queued(&self) -> usize {
        self.0.clear_queued()
    }

    /// (serial, payload) of up to `most` waiting jobs from serial `start` on, without claiming them.
    fn peek<'py>(
        &self,
        py: Python<'py>,
        start: u64,
        most: usize,
    ) -> Vec<(u64, Bound<'py, PyBytes>)> {
        let found = self.0.peek(start, most).into_iter();
        found
            .map(|(serial, payload)| (serial, PyBytes::new(py, &payload)))
            .collect()
    }

    /// Sleeps until there is work, or the time is over.
    fn wait_work(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        let timeout = seconds(timeout)?;
        py.detach(|| self.0.wait_work(timeout));
        Ok(())
    }

    fn outstanding(&self) -> usize {
        self.0.outstanding()
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
