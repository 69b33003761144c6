//! What of a heap goes into a checkpoint: the plan, the free list and the live table, relative to the base.

use super::Heap;
use crate::planner::Plan;

/// Position-independent state of a heap.
#[derive(Debug, Clone, Default)]
pub struct HeapState {
    /// The plan in force.
    pub plan: Option<Plan>,
    /// Phase marks of the plan.
    pub marks: Vec<(String, u32)>,
    /// Free runs of the main arena as (first unit, units).
    pub free_runs: Vec<(u32, u32)>,
    /// Live blocks as (offset, requested bytes, label), in address order.
    pub live: Vec<(u64, u64, usize)>,
    /// Units of the address range.
    pub capacity: u32,
}

impl Heap {
    /// The state now. Offsets are relative to the first unit, never addresses.
    pub fn state(&self) -> HeapState {
        let mut live: Vec<(u64, u64, usize)> = self
            .live
            .values()
            .map(|b| (b.place.offset, b.requested, b.label as usize))
            .collect();
        live.sort_unstable();
        HeapState {
            plan: self.plan.as_ref().map(|c| c.replay.plan().clone()),
            marks: self.step.plan_marks.clone(),
            free_runs: self
                .arenas
                .first()
                .map(|a| a.arena.runs.free_runs())
                .unwrap_or_default(),
            live,
            capacity: self.capacity,
        }
    }
}
