//! Steps: recording, planning at the border, guarded replay, dissolving a plan that does not fit.

use super::choose::{Choice, PlanRule};
use super::{Heap, Label};
use crate::device::StreamId;
use crate::error::{PoolError, Result};
use crate::planner::{self, Plan};
use crate::replay::{MISSES, ReplayCounters};
use crate::trace::{Item, peak_live};

/// Where the blocks of a step came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum StepSource {
    /// No plan: run fit, recorded.
    #[default]
    Profiled,
    /// Plan replayed.
    Replayed,
    /// A plan was there but dissolved in mid-step: the rest was run fit.
    Dissolved,
    /// A plan was there but its region could not be carved.
    NoRegion,
    /// Run fit by choice: a plan would save too little, or none is wanted.
    RunFit,
}

/// What happened in one step.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StepReport {
    /// Serial number of the step, from 1.
    pub serial: u32,
    /// Where the blocks came from.
    pub source: StepSource,
    /// Ephemeral allocations on the step's stream.
    pub allocs: u64,
    /// Planned hits.
    pub hits: u64,
    /// Misses by reason.
    pub misses: [u64; MISSES],
    /// Times the replay found its place again after a difference.
    pub resyncs: u64,
    /// Largest sum of requested bytes of blocks that did not outlive the step.
    pub peak_requested: u64,
    /// Blocks that outlived the step.
    pub survivors: u64,
    /// Whether a new plan was made at the end.
    pub planned: bool,
    /// Bytes of the plan in force.
    pub plan_bytes: u64,
    /// Device reservations and commits during the step.
    pub device_calls: u64,
    /// What serves the next step, and why.
    pub choice: Choice,
    /// Time of the calls of this step in nanoseconds, where the caller keeps the clock.
    pub call_ns: u64,
}

/// Step and index of a recorded allocation.
pub(super) type Mark = (u32, u32);
/// The mark of an allocation that no step recorded.
pub(super) const UNRECORDED: Mark = (0, 0);

#[derive(Debug, Default)]
pub(super) struct Step {
    pub open: bool,
    pub serial: u32,
    pub stream: StreamId,
    pub source: StepSource,
    pub phase: String,
    /// Name of each phase and the index of its first allocation.
    pub marks: Vec<(String, u32)>,
    pub log: Vec<Item>,
    before: ReplayCounters,
    calls_before: u64,
    ns_before: u64,
    pub plan_marks: Vec<(String, u32)>,
}

impl Step {
    /// Whether an ephemeral allocation on `stream` belongs to the open step.
    pub fn records(&self, stream: StreamId) -> bool {
        self.open && stream == self.stream
    }

    /// Record an allocation; returns its number.
    pub fn record(&mut self, size: u64) -> Mark {
        self.log.push(Item {
            size,
            end: Item::STAYS,
        });
        (self.serial, self.log.len() as u32 - 1)
    }

    /// The last recorded allocation failed. A block freed while room was looked for may name it as its end.
    fn unrecord(&mut self) {
        self.log.pop();
        let count = self.log.len() as u32;
        for item in &mut self.log {
            if !item.stays() {
                item.end = item.end.min(count);
            }
        }
    }

    /// A block came back.
    pub fn freed(&mut self, step: u32, index: u32) {
        if self.open && step == self.serial {
            let end = self.log.len() as u32;
            if let Some(item) = self.log.get_mut(index as usize) {
                item.end = end;
            }
        }
    }
}

impl Heap {
    /// Open a step on `stream`. The first one is recorded; once a plan exists, it is replayed.
    pub fn begin_step(&mut self, stream: StreamId) -> Result<StepSource> {
        if self.step.open {
            return Err(PoolError::BadStep {
                what: "a step is open; end it first".into(),
            });
        }
        if self.arenas.is_empty() {
            self.start(stream)?;
        }
        self.step.serial += 1;
        self.step.stream = stream;
        self.step.log.clear();
        self.step.marks.clear();
        self.step.phase.clear();
        self.step.calls_before = self.counters.device_allocs + self.counters.commits;
        self.step.ns_before = self.call_ns();
        for owned in &mut self.arenas {
            owned.arena.forget_lives();
        }
        self.step.source = if self.plan.is_none() {
            self.choice.source_without_plan()
        } else if self.owner_of(stream) == 0 && self.carve() {
            StepSource::Replayed
        } else {
            StepSource::NoRegion
        };
        if let Some(carved) = &mut self.plan {
            carved.replay.begin();
            self.step.before = carved.replay.counters;
        }
        self.step.open = true;
        Ok(self.step.source)
    }

    /// Name the phase the open step enters (forward, backward, optimizer ...). A replay continues at the index where
    /// that phase began in the profiled step, so an extra allocation in one phase does not shift the next one.
    pub fn phase(&mut self, name: &str) {
        name.clone_into(&mut self.step.phase);
        if !self.step.open {
            return;
        }
        let occurrence = self.step.marks.iter().filter(|(n, _)| n == name).count();
        self.step
            .marks
            .push((name.to_owned(), self.step.log.len() as u32));
        if self.step.source == StepSource::Replayed {
            let wanted = self
                .step
                .plan_marks
                .iter()
                .filter(|(n, _)| n == name)
                .nth(occurrence);
            if let (Some(&(_, index)), Some(carved)) = (wanted, &mut self.plan) {
                carved.replay.seek(index);
            }
        }
    }

    /// Serve an ephemeral allocation of the open step.
    pub(super) fn alloc_in_step(&mut self, size: u64, stream: StreamId) -> Result<u64> {
        if self.step.source == StepSource::Replayed
            && let Some(address) = self.take_planned(size, stream)
        {
            return Ok(address);
        }
        let owner = self.owner_of(stream);
        let mark = self.step.record(size);
        let served = self.alloc_online(size, stream, Label::Ephemeral, owner, mark);
        if served.is_err() {
            self.step.unrecord();
        }
        served
    }

    /// Close the step; with `learn`, make a better plan when it was not all hits. A step that an error cut short teaches
    /// nothing.
    pub fn end_step(&mut self, learn: bool) -> Result<StepReport> {
        if !self.step.open {
            return Err(PoolError::BadStep {
                what: "no step is open; begin one first".into(),
            });
        }
        if self.waiting > 0 || !self.deferred.is_empty() {
            self.poll();
        }
        self.step.open = false;
        let mut report = StepReport {
            serial: self.step.serial,
            source: self.step.source,
            allocs: self.step.log.len() as u64,
            peak_requested: peak_live(&self.step.log),
            survivors: self.step.log.iter().filter(|i| i.stays()).count() as u64,
            device_calls: self.counters.device_allocs + self.counters.commits
                - self.step.calls_before,
            call_ns: self.call_ns().saturating_sub(self.step.ns_before),
            ..StepReport::default()
        };
        if let Some(carved) = &self.plan {
            let now = carved.replay.counters;
            report.hits = now.hits - self.step.before.hits;
            report.resyncs = now.resyncs - self.step.before.resyncs;
            for (at, miss) in report.misses.iter_mut().enumerate() {
                *miss = now.misses[at] - self.step.before.misses[at];
            }
        }
        report.planned = learn && self.learn(&report)?;
        report.choice = self.choice;
        report.plan_bytes = self.plan.as_ref().map_or(0, |c| c.replay.plan().high_water);
        Ok(report)
    }

    fn call_ns(&self) -> u64 {
        self.alloc_time.total_ns() + self.free_time.total_ns()
    }

    fn learn(&mut self, report: &StepReport) -> Result<bool> {
        if report.allocs == 0 || self.counters.plans >= u64::from(self.config.max_plans) {
            return Ok(false);
        }
        let items = match &self.plan {
            None if matches!(self.rule, PlanRule::Above(_)) => return self.choose(report),
            None if self.rule == PlanRule::Never => return Ok(false),
            None => self.step.log.clone(),
            Some(carved) => {
                // Blocks that a plan could have held: all that came and went inside the step.
                let plannable = report.allocs - report.survivors;
                if report.hits >= plannable && report.resyncs == 0 {
                    return Ok(false);
                }
                let known = &carved.replay.plan().items;
                let merged =
                    planner::merge(known, &self.step.log).unwrap_or_else(|| self.step.log.clone());
                if merged == *known {
                    return Ok(false);
                }
                merged
            }
        };
        let made = planner::plan(&items)?;
        self.use_plan(made)
    }

    /// Put a plan made from the step that just ended in force.
    pub(super) fn use_plan(&mut self, made: Plan) -> Result<bool> {
        if made.high_water == 0 {
            return Ok(false);
        }
        let marks = self.step.marks.clone();
        self.set_plan(made, marks)?;
        Ok(true)
    }
}
