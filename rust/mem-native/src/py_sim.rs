//! Traces, plans and policies for Python.

use loongforge_pool::planner::{self, Plan};
use loongforge_pool::simulate::{self as sim, POLICIES};
use loongforge_pool::stats::Histogram;
use loongforge_pool::trace::{Event, Item, items, peak_live};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::parts::{PlanParts, plan_from, plan_parts};
use crate::stats::to_python;

/// Events as Python sees them: (is allocation, identifier, bytes).
pub type Events = Vec<(bool, u64, u64)>;

/// Events from their parts.
pub fn events(raw: Events) -> Vec<Event> {
    raw.into_iter()
        .map(|(is_alloc, id, size)| {
            if is_alloc {
                Event::Alloc { id, size }
            } else {
                Event::Free { id }
            }
        })
        .collect()
}

fn item_list(sizes: Vec<u64>, ends: Vec<i64>) -> PyResult<Vec<Item>> {
    if sizes.len() != ends.len() {
        return Err(PyValueError::new_err(format!(
            "{} sizes but {} ends; give one end per size",
            sizes.len(),
            ends.len()
        )));
    }
    Ok(sizes
        .into_iter()
        .zip(ends)
        .map(|(size, end)| Item {
            size,
            end: u32::try_from(end).unwrap_or(Item::STAYS),
        })
        .collect())
}

/// Names of the policies.
#[pyfunction]
pub fn policies() -> Vec<&'static str> {
    POLICIES.iter().map(|&(name, _)| name).collect()
}

/// Items of a trace of (is_alloc, id, size): sizes, ends (-1: stays) and the peak of live bytes.
#[pyfunction]
pub fn trace_items(raw: Events) -> PyResult<(Vec<u64>, Vec<i64>, u64)> {
    let list = items(&events(raw)).map_err(to_python)?;
    let peak = peak_live(&list);
    let ends = list
        .iter()
        .map(|i| if i.stays() { -1 } else { i64::from(i.end) })
        .collect();
    Ok((list.iter().map(|i| i.size).collect(), ends, peak))
}

/// Plan items; returns sizes, ends, offsets (-1: unplanned), bytes, no marks; and the name of the winning order.
#[pyfunction]
pub fn make_plan(
    py: Python<'_>,
    sizes: Vec<u64>,
    ends: Vec<i64>,
) -> PyResult<(PlanParts, &'static str)> {
    let list = item_list(sizes, ends)?;
    let plan = py.detach(|| planner::plan(&list)).map_err(to_python)?;
    Ok((plan_parts(&plan, &[]), plan.order))
}

/// Check a plan; raises ValueError when two blocks that live together overlap.
#[pyfunction]
pub fn verify_plan(parts: PlanParts) -> PyResult<()> {
    let plan: Plan = plan_from(parts).0;
    planner::verify(&plan).map_err(to_python)
}

/// Per-index maxima of two recordings, or None when they have different numbers of allocations.
#[pyfunction]
#[allow(clippy::type_complexity)]
pub fn merge_items(
    a: (Vec<u64>, Vec<i64>),
    b: (Vec<u64>, Vec<i64>),
) -> PyResult<Option<(Vec<u64>, Vec<i64>)>> {
    let merged = planner::merge(&item_list(a.0, a.1)?, &item_list(b.0, b.1)?);
    Ok(merged.map(|list| {
        let ends = list
            .iter()
            .map(|i| if i.stays() { -1 } else { i64::from(i.end) })
            .collect();
        (list.iter().map(|i| i.size).collect(), ends)
    }))
}

/// Run one policy over a trace.
#[pyfunction]
#[pyo3(signature = (raw, policy, repeats=1))]
pub fn simulate<'py>(
    py: Python<'py>,
    raw: Events,
    policy: &str,
    repeats: u32,
) -> PyResult<Bound<'py, PyDict>> {
    let Some(&(_, chosen)) = POLICIES.iter().find(|(name, _)| *name == policy) else {
        return Err(PyValueError::new_err(format!(
            "policy {policy:?} is unknown; allowed: {:?}",
            policies()
        )));
    };
    let events = events(raw);
    let outcome = py
        .detach(|| sim::simulate(&events, chosen, repeats))
        .map_err(to_python)?;
    let out = PyDict::new(py);
    out.set_item("policy", policy)?;
    out.set_item("allocations", outcome.allocs)?;
    out.set_item("peak_requested_bytes", outcome.peak_requested)?;
    out.set_item("high_water_bytes", outcome.high_water)?;
    out.set_item("internal_waste", outcome.waste.internal)?;
    out.set_item("reserve_overhead", outcome.waste.reserve)?;
    out.set_item("external_fragmentation", outcome.waste.external)?;
    out.set_item("plan_ms", outcome.plan_ns as f64 / 1e6)?;
    out.set_item("planned_hits", outcome.hits)?;
    for (name, h) in [("alloc", &outcome.alloc), ("pair", &outcome.pair)] {
        quantiles(&out, name, h)?;
    }
    Ok(out)
}

/// Put the quantiles of a histogram into a dictionary.
pub fn quantiles(out: &Bound<'_, PyDict>, name: &str, h: &Histogram) -> PyResult<()> {
    for (label, q) in [("p50", 0.5), ("p99", 0.99), ("p999", 0.999)] {
        out.set_item(format!("{name}_{label}_ns"), h.quantile(q))?;
    }
    Ok(())
}
