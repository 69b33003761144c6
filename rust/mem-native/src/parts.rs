//! Plain data that crosses the border: plans, heap states, settings.

use loongforge_pool::heap::{Heap, HeapConfig, PlanRule};
use loongforge_pool::planner::Plan;
use loongforge_pool::trace::Item;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::global::Source;

/// Plan data as Python sees it: sizes, ends (-1: stays), offsets (-1: unplanned), bytes, phase marks.
pub type PlanParts = (Vec<u64>, Vec<i64>, Vec<i64>, u64, Vec<(String, u32)>);
/// Heap state: plan, free runs, live blocks, units.
pub type StateParts = (
    Option<PlanParts>,
    Vec<(u32, u32)>,
    Vec<(u64, u64, usize)>,
    u32,
);

/// Build a heap configuration; `None` limit means none.
pub fn heap_config(initial: u64, grow: u64, limit: Option<u64>, slab_max: u64) -> HeapConfig {
    HeapConfig {
        initial_bytes: initial,
        grow_bytes: grow,
        limit_bytes: limit.unwrap_or(u64::MAX),
        slab_max,
        ..HeapConfig::default()
    }
}

/// Source by name.
pub fn source(name: &str) -> PyResult<Source> {
    match name {
        "host" => Ok(Source::Host),
        "cuda" => Ok(Source::Cuda),
        "vmm" => Ok(Source::Vmm),
        other => Err(PyValueError::new_err(format!(
            "memory source {other:?} is unknown; allowed: 'host', 'cuda', 'vmm'"
        ))),
    }
}

/// The rule by its name and share.
pub fn plan_rule(name: &str, share: f64) -> PyResult<PlanRule> {
    match name {
        "always" => Ok(PlanRule::Always),
        "never" => Ok(PlanRule::Never),
        "above" if (0.0..1.0).contains(&share) => Ok(PlanRule::Above(share)),
        other => Err(PyValueError::new_err(format!(
            "plan rule {other:?} with share {share} is unknown; allowed: 'always', 'never', 'above' with 0 <= share < 1"
        ))),
    }
}

/// A plan from its parts.
pub fn plan_from(parts: PlanParts) -> (Plan, Vec<(String, u32)>) {
    let (sizes, ends, offsets, high_water, marks) = parts;
    let items = sizes
        .into_iter()
        .zip(ends)
        .map(|(size, end)| Item {
            size,
            end: u32::try_from(end).unwrap_or(Item::STAYS),
        })
        .collect();
    let offsets = offsets
        .into_iter()
        .map(|o| u64::try_from(o).unwrap_or(u64::MAX))
        .collect();
    (
        Plan {
            items,
            offsets,
            high_water,
            order: "given",
        },
        marks,
    )
}

/// The parts of a plan.
pub fn plan_parts(plan: &Plan, marks: &[(String, u32)]) -> PlanParts {
    (
        plan.items.iter().map(|i| i.size).collect(),
        plan.items
            .iter()
            .map(|i| if i.stays() { -1 } else { i64::from(i.end) })
            .collect(),
        plan.offsets
            .iter()
            .map(|&o| i64::try_from(o).unwrap_or(-1))
            .collect(),
        plan.high_water,
        marks.to_vec(),
    )
}

/// The state of a heap.
pub fn state_parts(heap: &Heap) -> StateParts {
    let s = heap.state();
    (
        s.plan.as_ref().map(|p| plan_parts(p, &s.marks)),
        s.free_runs,
        s.live,
        s.capacity,
    )
}
