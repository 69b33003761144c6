//! Timing of whole steps, through the heap or through the C functions.

use loongforge_pool::error::{PoolError, Result};
use loongforge_pool::simulate::{self as sim, HeapTimes, StepCalls};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::global;
use crate::py_sim::{Events, events, quantiles};
use crate::stats::to_python;

/// The C functions that torch calls, on the process-wide heap of device 0.
struct ThroughC;

impl StepCalls for ThroughC {
    fn begin(&mut self) -> Result<()> {
        global::heap(0).map_or(Ok(()), |mut heap| heap.begin_step(0).map(|_| ()))
    }

    fn alloc(&mut self, size: u64) -> Result<u64> {
        let address = crate::cabi::lf_alloc(size as isize, 0, std::ptr::null_mut()) as u64;
        if address == 0 {
            Err(PoolError::OutOfMemory {
                size,
                free: 0,
                largest: 0,
            })
        } else {
            Ok(address)
        }
    }

    fn free(&mut self, address: u64) {
        crate::cabi::lf_free(address as *mut _, 0, 0, std::ptr::null_mut());
    }

    fn end(&mut self) -> Result<u64> {
        global::heap(0).map_or(Ok(0), |mut heap| {
            heap.end_step(true).map(|report| report.hits)
        })
    }
}

/// Time a trace run as steps: `where_` is "heap" (planned), "run_fit" (no plan) or "c_abi" (the configured process-wide
/// heap, through the functions that torch calls).
#[pyfunction]
pub fn time_steps<'py>(
    py: Python<'py>,
    raw: Events,
    where_: &str,
    steps: u32,
) -> PyResult<Bound<'py, PyDict>> {
    let events = events(raw);
    let times: HeapTimes = match where_ {
        "heap" => py.detach(|| sim::time_heap(&events, steps, true)),
        "run_fit" => py.detach(|| sim::time_heap(&events, steps, false)),
        "c_abi" => py.detach(|| sim::time_steps(&events, steps, &mut ThroughC)),
        other => {
            return Err(PyValueError::new_err(format!(
                "{other:?} is unknown; allowed: 'heap', 'run_fit', 'c_abi'"
            )));
        }
    }
    .map_err(to_python)?;
    let out = PyDict::new(py);
    quantiles(&out, "alloc", &times.alloc)?;
    quantiles(&out, "pair", &times.pair)?;
    out.set_item("alloc_within_10us", times.alloc.fraction_within(10_000))?;
    out.set_item("pair_within_10us", times.pair.fraction_within(10_000))?;
    out.set_item(
        "mean_pair_ns",
        times.pair.total_ns() as f64 / times.pair.count().max(1) as f64,
    )?;
    out.set_item("planned_hits", times.hits)?;
    out.set_item("allocations", times.allocs)?;
    Ok(out)
}
