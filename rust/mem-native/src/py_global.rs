//! The process-wide allocator for Python.

use loongforge_pool::heap::Label;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::global;
use crate::parts::{PlanParts, StateParts, plan_from, plan_rule, state_parts};
use crate::stats::{Figures, heap_stats, source_name, step_report, to_python};

fn none_yet(device: i32) -> PyErr {
    PyRuntimeError::new_err(format!("no memory was allocated on device {device} yet"))
}

/// Set the label of this thread's allocations; returns the one before.
#[pyfunction]
pub fn set_label(label: usize) -> usize {
    global::set_label(Label::from_index(label)) as usize
}

/// Label of this thread's allocations.
#[pyfunction]
pub fn global_label() -> usize {
    global::label() as usize
}

/// Change the label of live blocks by their addresses; returns how many were found.
#[pyfunction]
pub fn global_relabel(device: i32, addresses: Vec<u64>, label: usize) -> usize {
    global::existing(device).map_or(0, |mut heap| {
        addresses
            .into_iter()
            .filter(|&a| heap.relabel(a, Label::from_index(label)))
            .count()
    })
}

/// Open a step on `stream` of `device`.
#[pyfunction]
pub fn global_begin_step(py: Python<'_>, device: i32, stream: u64) -> PyResult<&'static str> {
    py.detach(|| {
        let mut heap = global::heap(device).map_err(PyRuntimeError::new_err)?;
        heap.begin_step(stream).map(source_name).map_err(to_python)
    })
}

/// Name the phase of the open step.
#[pyfunction]
pub fn global_phase(device: i32, name: &str) {
    if let Some(mut heap) = global::existing(device) {
        heap.phase(name);
    }
}

/// Close the step.
#[pyfunction]
#[pyo3(signature = (device, learn=true))]
pub fn global_end_step(py: Python<'_>, device: i32, learn: bool) -> PyResult<Bound<'_, PyDict>> {
    let report = py.detach(|| {
        let mut heap = global::existing(device).ok_or_else(|| none_yet(device))?;
        heap.end_step(learn).map_err(to_python)
    })?;
    step_report(py, &report)
}

/// Figures of a device, or None before its first allocation.
#[pyfunction]
pub fn global_stats(py: Python<'_>, device: i32) -> PyResult<Option<Bound<'_, PyDict>>> {
    let figures = global::existing(device).map(|heap| Figures::of(&heap));
    figures.map(|f| heap_stats(py, f)).transpose()
}

/// Start peaks (and, with `totals`, running totals and times) again.
#[pyfunction]
#[pyo3(signature = (device, *, totals=false))]
pub fn global_reset(device: i32, totals: bool) {
    if let Some(mut heap) = global::existing(device) {
        heap.reset_peaks();
        if totals {
            heap.reset_totals();
        }
    }
}

/// Give unused memory back to the device; returns the bytes.
#[pyfunction]
pub fn global_trim(py: Python<'_>, device: i32) -> u64 {
    py.detach(|| global::existing(device).map_or(0, |mut heap| heap.trim()))
}

/// Use a plan from the next step on.
#[pyfunction]
pub fn global_set_plan(py: Python<'_>, device: i32, parts: PlanParts) -> PyResult<()> {
    let (plan, marks) = plan_from(parts);
    py.detach(|| {
        let mut heap = global::heap(device).map_err(PyRuntimeError::new_err)?;
        heap.set_plan(plan, marks).map_err(to_python)
    })
}

/// When a plan serves the steps: "always", "never", or "above" a share of saved memory.
#[pyfunction]
#[pyo3(signature = (device, rule, share=0.0))]
pub fn global_set_plan_rule(device: i32, rule: &str, share: f64) -> PyResult<()> {
    let rule = plan_rule(rule, share)?;
    let mut heap = global::heap(device).map_err(PyRuntimeError::new_err)?;
    heap.set_plan_rule(rule);
    Ok(())
}

/// Position-independent state of a device's heap.
#[pyfunction]
pub fn global_state(device: i32) -> Option<StateParts> {
    global::existing(device).map(|heap| state_parts(&heap))
}
