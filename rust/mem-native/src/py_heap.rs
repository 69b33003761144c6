//! A heap of its own: host memory, or logical time for tests.

use std::sync::{Mutex, MutexGuard, PoisonError};

use loongforge_pool::device::{FakeDevice, SharedDevice};
use loongforge_pool::heap::{Heap, Label};
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::global::{GlobalConfig, make};
use crate::parts::{PlanParts, StateParts, heap_config, plan_from, plan_rule, source, state_parts};
use crate::stats::{Figures, heap_stats, source_name, step_report, to_python};

/// A heap that Python owns.
#[pyclass(name = "Heap", module = "loongforge_mem._core", frozen)]
pub struct PyHeap {
    heap: Mutex<Heap>,
    /// The stand-in device, where the heap has one: tests decide when its work is done.
    fake: Option<SharedDevice>,
}

impl PyHeap {
    fn fake(&self) -> PyResult<&SharedDevice> {
        let text = "only a heap on the stand-in device ('fake') has logical time";
        self.fake
            .as_ref()
            .ok_or_else(|| pyo3::exceptions::PyRuntimeError::new_err(text))
    }

    fn lock(&self) -> MutexGuard<'_, Heap> {
        self.heap.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl PyHeap {
    #[new]
    #[pyo3(signature = (source_name="host", *, initial_bytes=0, grow_bytes=256 << 20, limit_bytes=None,
                        slab_max=loongforge_pool::SLAB_MAX, budget_bytes=None, contiguous=false, commits=false, device=0))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        source_name: &str,
        initial_bytes: u64,
        grow_bytes: u64,
        limit_bytes: Option<u64>,
        slab_max: u64,
        budget_bytes: Option<u64>,
        contiguous: bool,
        commits: bool,
        device: i32,
    ) -> PyResult<Self> {
        let config = heap_config(initial_bytes, grow_bytes, limit_bytes, slab_max);
        let heap = if source_name == "fake" {
            let budget = budget_bytes.unwrap_or(1 << 40);
            let fake = if commits {
                FakeDevice::committing(budget)
            } else {
                FakeDevice::new(budget, contiguous)
            };
            let shared = SharedDevice::new(fake);
            let heap = Heap::new(Box::new(shared.clone()), config);
            return Ok(Self {
                heap: Mutex::new(heap),
                fake: Some(shared),
            });
        } else {
            make(
                GlobalConfig {
                    source: source(source_name)?,
                    heap: config,
                },
                device,
            )
            .map_err(PyOSError::new_err)?
        };
        Ok(Self {
            heap: Mutex::new(heap),
            fake: None,
        })
    }

    #[pyo3(signature = (size, stream=0, label=0))]
    fn alloc(&self, size: u64, stream: u64, label: usize) -> PyResult<u64> {
        let mut heap = self.lock();
        heap.alloc(size, stream, Label::from_index(label))
            .map_err(|error| match (&error, heap.last_oom()) {
                (loongforge_pool::PoolError::OutOfMemory { .. }, Some(text)) => {
                    pyo3::exceptions::PyMemoryError::new_err(text.to_owned())
                }
                _ => to_python(error),
            })
    }

    fn free(&self, address: u64) -> PyResult<()> {
        self.lock().free(address).map_err(to_python)
    }

    fn owns(&self, address: u64) -> bool {
        self.lock().owns(address)
    }

    fn record_stream(&self, address: u64, stream: u64) -> PyResult<()> {
        self.lock()
            .record_stream(address, stream)
            .map_err(to_python)
    }

    #[pyo3(signature = (stream=0))]
    fn begin_step(&self, stream: u64) -> PyResult<&'static str> {
        self.lock()
            .begin_step(stream)
            .map(source_name)
            .map_err(to_python)
    }

    fn phase(&self, name: &str) {
        self.lock().phase(name);
    }

    #[pyo3(signature = (learn=true))]
    fn end_step<'py>(&self, py: Python<'py>, learn: bool) -> PyResult<Bound<'py, PyDict>> {
        // Planning takes milliseconds: other Python threads go on meanwhile.
        let report = py
            .detach(|| self.lock().end_step(learn))
            .map_err(to_python)?;
        step_report(py, &report)
    }

    fn set_plan(&self, py: Python<'_>, parts: PlanParts) -> PyResult<()> {
        let (plan, marks) = plan_from(parts);
        py.detach(|| self.lock().set_plan(plan, marks))
            .map_err(to_python)
    }

    /// When a plan serves the steps: "always", "never", or "above" a share of saved memory.
    #[pyo3(signature = (rule, share=0.0))]
    fn set_plan_rule(&self, rule: &str, share: f64) -> PyResult<()> {
        self.lock().set_plan_rule(plan_rule(rule, share)?);
        Ok(())
    }

    fn forget_plan(&self) -> PyResult<()> {
        self.lock().forget_plan().map_err(to_python)
    }

    fn state(&self) -> StateParts {
        state_parts(&self.lock())
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let figures = Figures::of(&self.lock());
        heap_stats(py, figures)
    }

    #[pyo3(signature = (*, totals=false))]
    fn reset(&self, totals: bool) {
        let mut heap = self.lock();
        heap.reset_peaks();
        if totals {
            heap.reset_totals();
        }
    }

    fn trim(&self, py: Python<'_>) -> u64 {
        py.detach(|| self.lock().trim())
    }

    /// Enqueue work on `stream` that uses the block (stand-in device only).
    #[pyo3(signature = (address, stream))]
    fn r#use(&self, address: u64, stream: u64) -> PyResult<()> {
        if !self.lock().owns(address) {
            return Err(to_python(loongforge_pool::PoolError::UnknownBlock {
                address,
            }));
        }
        self.fake()?.get().work(stream);
        Ok(())
    }

    /// Complete all work of `stream` (stand-in device only).
    fn complete(&self, stream: u64) -> PyResult<()> {
        let mut device = self.fake()?.get();
        let time = device.work(stream);
        device.complete(stream, time);
        Ok(())
    }

    /// Start (a capture number) or end (None) a capture on `stream` (stand-in device only).
    #[pyo3(signature = (stream, capture))]
    fn set_capture(&self, stream: u64, capture: Option<u64>) -> PyResult<()> {
        self.fake()?.get().set_capture(stream, capture);
        Ok(())
    }

    fn begin_capture(&self, first: u64, second: u64) -> PyResult<()> {
        self.lock()
            .begin_capture((first, second))
            .map_err(to_python)
    }

    fn end_capture(&self, first: u64, second: u64) -> PyResult<()> {
        self.lock().end_capture((first, second)).map_err(to_python)
    }

    fn release_pool(&self, first: u64, second: u64) -> PyResult<()> {
        self.lock().release_pool((first, second)).map_err(to_python)
    }
}
