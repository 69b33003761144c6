//! `Board`: jobs in shared memory, published by the owner and claimed by workers.

use std::sync::Arc;

use loongforge_ring::protocol::job;
use loongforge_ring::ring::{NO_SLOT, Ring as Core};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors::{seconds, to_python};

/// (serial, worker, seconds since it was claimed)
type Held = (u64, u32, f64);

/// The jobs of a ring.
#[pyclass(frozen, module = "loongforge_data._core")]
pub struct Board(pub Arc<Core>);

#[pymethods]
impl Board {
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
            .map(|report| (report.serial, PyBytes::new(py, &report.error)))
            .collect()
    }

    fn claimed(&self) -> Vec<Held> {
        self.0
            .claimed()
            .into_iter()
            .map(|r| (r.serial, r.worker, r.age as f64 * 1e-9))
            .collect()
    }

    /// Payload of a job that is not finished; None for others.
    fn payload<'py>(&self, py: Python<'py>, serial: u64) -> Option<Bound<'py, PyBytes>> {
        self.0.job(serial).map(|bytes| PyBytes::new(py, &bytes))
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
}
