//! Steps: recording, planning at the border, guarded replay, dissolving a plan that does not fit.

use super::{Block, Carved, Heap, Label};
use crate::arena::{NO_SLOT, Place};
use crate::device::StreamId;
use crate::error::{PoolError, Result};
use crate::planner::{self, Plan};
use crate::replay::{MISSES, Miss, Replay, ReplayCounters};
use crate::trace::{Item, peak_live};
use crate::{QUANTUM, SPAN, UNIT};

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
}

#[derive(Debug, Default)]
pub(super) struct Step {
    pub open: bool,
    pub serial: u32,
    pub stream: StreamId,
    pub source: StepSource,
    pub phase: String,
    /// Name of each phase and the index of its first allocation.
    pub marks: Vec<(String, u32)>,
    log: Vec<Item>,
    before: ReplayCounters,
    calls_before: u64,
    pub plan_marks: Vec<(String, u32)>,
}

impl Step {
    /// Whether an ephemeral allocation on `stream` belongs to the open step.
    pub fn records(&self, stream: StreamId) -> bool {
        self.open && stream == self.stream
    }

    /// Number the allocation just made.
    pub fn mark(&self, stream: StreamId) -> (u32, u32) {
        if self.records(stream) {
            (self.serial, self.log.len() as u32 - 1)
        } else {
            (0, 0)
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
        self.step.source = if self.plan.is_none() {
            StepSource::Profiled
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
        self.step.log.push(Item {
            size,
            end: Item::STAYS,
        });
        let served = self.alloc_online(size, stream, Label::Ephemeral, owner);
        if served.is_err() {
            self.step.log.pop();
        }
        served
    }

    fn take_planned(&mut self, size: u64, stream: StreamId) -> Option<u64> {
        let carved = self.plan.as_mut()?;
        let region = carved.region?;
        match carved.replay.take(size) {
            Ok((index, offset)) => {
                let planned = carved.replay.plan().items[index as usize].size;
                let place = Place {
                    offset: u64::from(region) * UNIT + offset,
                    granted: planned.div_ceil(QUANTUM) * QUANTUM,
                    slot: NO_SLOT,
                };
                self.step.log.push(Item {
                    size,
                    end: Item::STAYS,
                });
                Some(self.adopt(place, size, stream, Label::Ephemeral, 0, index))
            }
            Err(Miss::Larger) => {
                // The shapes grew: the rest of the step needs the room that the plan holds.
                self.dissolve_plan();
                self.step.source = StepSource::Dissolved;
                None
            }
            Err(_) => None,
        }
    }

    /// Return a planned block to its slot, or to the main arena when its plan was dissolved.
    pub(super) fn give_slot(&mut self, block: Block) {
        if let Some(carved) = &mut self.plan
            && carved.serial == block.plan
            && carved.region.is_some()
        {
            carved.replay.give(block.slot);
            return;
        }
        let first = (block.place.offset / UNIT) as u32;
        let last = ((block.place.offset + block.place.granted - 1) / UNIT) as u32;
        for unit in first..=last {
            let Some(count) = self.residual.get_mut(&u64::from(unit)) else {
                continue;
            };
            *count -= 1;
            if *count == 0 {
                self.residual.remove(&u64::from(unit));
                self.arenas[0].arena.runs.give(unit, 1);
            }
        }
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
        report.plan_bytes = self.plan.as_ref().map_or(0, |c| c.replay.plan().high_water);
        Ok(report)
    }

    fn learn(&mut self, report: &StepReport) -> Result<bool> {
        if report.allocs == 0 || self.counters.plans >= u64::from(self.config.max_plans) {
            return Ok(false);
        }
        let items = match &self.plan {
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
        if made.high_water == 0 {
            return Ok(false);
        }
        let marks = self.step.marks.clone();
        self.set_plan(made, marks)?;
        Ok(true)
    }

    /// Use `plan` from the next step on.
    pub fn set_plan(&mut self, plan: Plan, marks: Vec<(String, u32)>) -> Result<()> {
        if self.step.open {
            return Err(PoolError::BadStep {
                what: "a plan changes between steps only".into(),
            });
        }
        let units =
            u32::try_from(plan.high_water.div_ceil(UNIT)).map_err(|_| PoolError::BadPlan {
                what: format!("needs {} bytes", plan.high_water),
            })?;
        let replay = Replay::new(plan)?;
        self.dissolve_plan();
        self.plan_serial += 1;
        self.counters.plans += 1;
        self.step.plan_marks = marks;
        self.plan = Some(Carved {
            replay,
            serial: self.plan_serial,
            region: None,
            units,
        });
        Ok(())
    }

    /// The plan in force and its phase marks.
    pub fn plan(&self) -> Option<(&Plan, &[(String, u32)])> {
        self.plan
            .as_ref()
            .map(|c| (c.replay.plan(), self.step.plan_marks.as_slice()))
    }

    /// Drop the plan; the next step is recorded.
    pub fn forget_plan(&mut self) -> Result<()> {
        if self.step.open {
            return Err(PoolError::BadStep {
                what: "a plan is dropped between steps only".into(),
            });
        }
        self.dissolve_plan();
        self.plan = None;
        Ok(())
    }

    /// Make sure that the region of the plan is ours.
    fn carve(&mut self) -> bool {
        let Some(carved) = &self.plan else {
            return false;
        };
        if carved.region.is_some() {
            return true;
        }
        let units = carved.units;
        let bytes = u64::from(units) * UNIT;
        let mut start = self.arenas[0].arena.runs.take(units);
        if start.is_none() {
            self.settle();
            start = self.arenas[0].arena.runs.take(units);
        }
        if start.is_none() && self.config.grow_bytes > 0 {
            // Whole free segments first, so that the plan replaces them instead of standing beside them.
            self.trim();
            start = self.arenas[0].arena.runs.take(units);
            if start.is_none() && self.add_segment(bytes.div_ceil(SPAN) * SPAN, false).is_ok() {
                start = self.arenas[0].arena.runs.take(units);
            }
        }
        let Some(start) = start else { return false };
        if self.device.commits() && self.missing_pages(start, units) > 0 && self.active.is_empty() {
            // What the profiled step left committed elsewhere pays for the region.
            self.decommit_free_pages();
        }
        if !self.touch(u64::from(start) * UNIT, bytes) {
            self.arenas[0].arena.runs.give(start, units);
            return false;
        }
        if let Some(carved) = &mut self.plan {
            carved.region = Some(start);
        }
        true
    }

    /// Give the region of the plan back, except the units under live blocks, which follow when those are freed. The
    /// plan itself stays and is carved again at the next step. True when units came free.
    pub(super) fn dissolve_plan(&mut self) -> bool {
        let Some(carved) = &mut self.plan else {
            return false;
        };
        let Some(region) = carved.region.take() else {
            return false;
        };
        let units = carved.units;
        let slots = carved.replay.live_slots();
        for &(index, offset, size) in &slots {
            carved.replay.give(index);
            let first = u64::from(region) + offset / UNIT;
            let last =
                u64::from(region) + (offset + size.max(1).div_ceil(QUANTUM) * QUANTUM - 1) / UNIT;
            for unit in first..=last {
                *self.residual.entry(unit).or_default() += 1;
            }
        }
        if self.step.open {
            self.counters.dissolved += 1;
            if self.step.source == StepSource::Replayed {
                self.step.source = StepSource::Dissolved;
            }
        }
        let mut freed = false;
        let mut run: Option<u32> = None;
        for unit in region..region + units {
            if self.residual.contains_key(&u64::from(unit)) {
                if let Some(start) = run.take() {
                    self.arenas[0].arena.runs.give(start, unit - start);
                    freed = true;
                }
            } else if run.is_none() {
                run = Some(unit);
            }
        }
        if let Some(start) = run {
            self.arenas[0]
                .arena
                .runs
                .give(start, region + units - start);
            freed = true;
        }
        // Blocks of the dissolved region carry an old serial, so a later carving never mistakes them for its own.
        self.plan_serial += 1;
        if let Some(carved) = &mut self.plan {
            carved.serial = self.plan_serial;
        }
        freed
    }
}
