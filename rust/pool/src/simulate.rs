//! Policies side by side on one trace.

use std::time::Instant;

use crate::arena::{Placement, RunFit};
use crate::buddy::PureBuddy;
use crate::caching::{CachingSim, ExpandableSim};
use crate::device::FakeDevice;
use crate::error::Result;
use crate::heap::{Heap, HeapConfig, Label};
use crate::planner;
use crate::replay::Replay;
use crate::stats::{Histogram, Waste, waste};
use crate::trace::{Event, Item, items, peak_live};
use crate::{QUANTUM, round_up};

/// A placement policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// Segment caching, as PyTorch does by default.
    BestFit,
    /// Expandable segments.
    Expandable,
    /// Power-of-two buddy from 512 bytes.
    PureBuddy,
    /// Power-of-two buddy from 1 MiB.
    PureBuddy1M,
    /// Run fit over 64 KiB units with a slab.
    RunFit,
    /// The same without looking at the lives of blocks.
    RunFitPlain,
    /// Offline plan replayed by index.
    Plan,
}

/// All policies with their names.
pub const POLICIES: [(&str, Policy); 7] = [
    ("best_fit", Policy::BestFit),
    ("expandable", Policy::Expandable),
    ("pure_buddy", Policy::PureBuddy),
    ("pure_buddy_1m", Policy::PureBuddy1M),
    ("run_fit", Policy::RunFit),
    ("run_fit_plain", Policy::RunFitPlain),
    ("plan", Policy::Plan),
];

/// Outcome of one policy on one trace.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// Largest sum of requested bytes of ephemeral blocks.
    pub peak_requested: u64,
    /// Bytes the policy needed.
    pub high_water: u64,
    /// The three fractions.
    pub waste: Waste,
    /// Time of every allocation.
    pub alloc: Histogram,
    /// Time of every allocation together with its free.
    pub pair: Histogram,
    /// Time to make the plan in nanoseconds; zero for online policies.
    pub plan_ns: u64,
    /// Planned hits; zero for online policies.
    pub hits: u64,
    /// Allocations that took part.
    pub allocs: u64,
}

/// Run `policy` over `events`. Blocks that are never freed are persistent: they are placed elsewhere and left out of
/// every figure. `repeats` runs are timed; the sizes come from the first.
pub fn simulate(events: &[Event], policy: Policy, repeats: u32) -> Result<Outcome> {
    let items = items(events)?;
    let schedule = schedule(&items);
    let peak_requested = peak_live(&items);
    let mut outcome = Outcome {
        peak_requested,
        high_water: 0,
        waste: Waste::default(),
        alloc: Histogram::default(),
        pair: Histogram::default(),
        plan_ns: 0,
        hits: 0,
        allocs: items.iter().filter(|i| !i.stays()).count() as u64,
    };
    if policy == Policy::Plan {
        let start = Instant::now();
        let mut replay = Replay::new(planner::plan(&items)?)?;
        outcome.plan_ns = start.elapsed().as_nanos() as u64;
        outcome.high_water = replay.plan().high_water;
        for _ in 0..repeats.max(1) {
            time_plan(&items, &schedule, &mut replay, &mut outcome);
        }
        outcome.hits = replay.counters.hits / u64::from(repeats.max(1));
        outcome.waste.internal = internal_of_plan(&items);
    } else {
        // One pool for all runs: every block of the last run is gone, and a pool lives as long as its process.
        let mut placement = make(policy);
        for repeat in 0..repeats.max(1) {
            time_online(
                &items,
                &schedule,
                placement.as_mut(),
                &mut outcome,
                repeat == 0,
            )?;
        }
    }
    outcome.waste.reserve = waste(peak_requested, outcome.high_water);
    Ok(outcome)
}

fn make(policy: Policy) -> Box<dyn Placement> {
    match policy {
        Policy::BestFit => Box::new(CachingSim::default()),
        Policy::Expandable => Box::new(ExpandableSim::default()),
        Policy::PureBuddy => Box::new(PureBuddy::new(9, 42)),
        Policy::PureBuddy1M => Box::new(PureBuddy::new(20, 42)),
        Policy::RunFit | Policy::Plan => Box::new(RunFit::unlimited()),
        Policy::RunFitPlain => Box::new(RunFit::unlimited().plain()),
    }
}

/// For every allocation, the indices freed just before it; the last entry holds the frees at the end.
fn schedule(items: &[Item]) -> Vec<Vec<u32>> {
    let mut frees = vec![Vec::new(); items.len() + 1];
    for (index, item) in items.iter().enumerate() {
        if !item.stays() {
            frees[item.end as usize].push(index as u32);
        }
    }
    frees
}

fn time_online(
    items: &[Item],
    frees: &[Vec<u32>],
    placement: &mut dyn Placement,
    outcome: &mut Outcome,
    first: bool,
) -> Result<()> {
    let mut offsets = vec![0_u64; items.len()];
    let mut took = vec![0_u64; items.len()];
    let (mut live, mut peak) = (0_u64, 0_u64);
    for index in 0..=items.len() {
        for &gone in &frees[index] {
            let start = Instant::now();
            placement.free(offsets[gone as usize])?;
            let ns = start.elapsed().as_nanos() as u64;
            outcome.pair.add(took[gone as usize] + ns);
            live -= items[gone as usize].size;
        }
        let Some(item) = items.get(index).filter(|i| !i.stays()) else {
            continue;
        };
        let start = Instant::now();
        offsets[index] = placement.alloc(item.size)?;
        took[index] = start.elapsed().as_nanos() as u64;
        outcome.alloc.add(took[index]);
        live += item.size;
        if first && live > peak {
            peak = live;
            outcome.waste.internal = waste(live, placement.granted());
            outcome.waste.external = waste(placement.largest_free(), placement.free_bytes());
        }
    }
    if first {
        outcome.high_water = placement.high_water();
    }
    Ok(())
}

fn time_plan(items: &[Item], frees: &[Vec<u32>], replay: &mut Replay, outcome: &mut Outcome) {
    let mut took = vec![0_u64; items.len()];
    replay.begin();
    for index in 0..=items.len() {
        for &gone in &frees[index] {
            let start = Instant::now();
            replay.give(gone);
            let ns = start.elapsed().as_nanos() as u64;
            outcome.pair.add(took[gone as usize] + ns);
        }
        let Some(item) = items.get(index) else {
            continue;
        };
        let start = Instant::now();
        let served = replay.take(item.size);
        took[index] = start.elapsed().as_nanos() as u64;
        if served.is_ok() {
            outcome.alloc.add(took[index]);
        }
    }
}

fn internal_of_plan(items: &[Item]) -> f64 {
    let rounded: Vec<Item> = items
        .iter()
        .map(|i| Item {
            size: round_up(i.size, QUANTUM).unwrap_or(i.size),
            end: i.end,
        })
        .collect();
    waste(peak_live(items), peak_live(&rounded))
}

/// Time of the whole heap path (labels, live table, guards) on a trace run as steps.
#[derive(Debug, Clone, Default)]
pub struct HeapTimes {
    /// Every allocation.
    pub alloc: Histogram,
    /// Every allocation together with its free.
    pub pair: Histogram,
    /// Planned hits of the last step.
    pub hits: u64,
    /// Allocations of a step.
    pub allocs: u64,
}

/// Run `events` as `steps` timed steps of a heap after two untimed ones (profile, first replay). `alloc` and `free` are
/// the calls under test; `begin` and `end` mark the step and `end` returns the planned hits.
pub fn time_steps(events: &[Event], steps: u32, calls: &mut dyn StepCalls) -> Result<HeapTimes> {
    let items = items(events)?;
    let frees = schedule(&items);
    let mut out = HeapTimes {
        allocs: items.len() as u64,
        ..HeapTimes::default()
    };
    for step in 0..steps + 2 {
        let mut addresses = vec![0_u64; items.len()];
        let mut took = vec![0_u64; items.len()];
        calls.begin()?;
        for index in 0..=items.len() {
            for &gone in &frees[index] {
                let start = Instant::now();
                calls.free(addresses[gone as usize]);
                let ns = start.elapsed().as_nanos() as u64;
                if step >= 2 {
                    out.pair.add(took[gone as usize] + ns);
                }
            }
            let Some(item) = items.get(index) else {
                continue;
            };
            let start = Instant::now();
            addresses[index] = calls.alloc(item.size)?;
            took[index] = start.elapsed().as_nanos() as u64;
            if step >= 2 {
                out.alloc.add(took[index]);
            }
        }
        out.hits = calls.end()?;
        for (item, &address) in items.iter().zip(&addresses) {
            if item.stays() {
                calls.free(address);
            }
        }
    }
    Ok(out)
}

/// The calls that [`time_steps`] times.
pub trait StepCalls {
    /// Open a step.
    fn begin(&mut self) -> Result<()>;
    /// Allocate; returns the address.
    fn alloc(&mut self, size: u64) -> Result<u64>;
    /// Free.
    fn free(&mut self, address: u64);
    /// Close the step; returns its planned hits.
    fn end(&mut self) -> Result<u64>;
}

impl StepCalls for Heap {
    fn begin(&mut self) -> Result<()> {
        self.begin_step(0).map(|_| ())
    }

    fn alloc(&mut self, size: u64) -> Result<u64> {
        Heap::alloc(self, size, 0, Label::Ephemeral)
    }

    fn free(&mut self, address: u64) {
        let _ = Heap::free(self, address);
    }

    fn end(&mut self) -> Result<u64> {
        self.end_step(true).map(|report| report.hits)
    }
}

/// [`time_steps`] over a heap on a device without memory, so that only our own work is timed.
pub fn time_heap(events: &[Event], steps: u32, planned: bool) -> Result<HeapTimes> {
    let config = HeapConfig {
        initial_bytes: 1 << 38,
        max_plans: if planned { 64 } else { 0 },
        ..HeapConfig::default()
    };
    let mut heap = Heap::new(Box::new(FakeDevice::new(1 << 40, false)), config);
    time_steps(events, steps, &mut heap)
}
