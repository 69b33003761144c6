//! The region of a plan: carved out of the main arena, served from by index, dissolved when a step does not fit it.

use super::{Block, Carved, Choice, Heap, Label, Reason, StepSource};
use crate::arena::{NO_SLOT, Place};
use crate::device::StreamId;
use crate::error::{PoolError, Result};
use crate::lives::UNFOLLOWED;
use crate::planner::Plan;
use crate::replay::{Miss, Replay};
use crate::{QUANTUM, SPAN, UNIT};

impl Heap {
    pub(super) fn take_planned(&mut self, size: u64, stream: StreamId) -> Option<u64> {
        let carved = self.plan.as_mut()?;
        let region = carved.region?;
        match carved.replay.take(size) {
            Ok((index, offset)) => {
                let planned = carved.replay.plan().items[index as usize].size;
                let place = Place {
                    offset: u64::from(region) * UNIT + offset,
                    granted: planned.div_ceil(QUANTUM) * QUANTUM,
                    slot: NO_SLOT,
                    birth: UNFOLLOWED,
                };
                let mark = self.step.record(size);
                Some(self.adopt(place, size, stream, Label::Ephemeral, 0, index, mark))
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
        if !self.choice.planned {
            self.choice = Choice {
                planned: true,
                reason: Reason::Asked,
                ..Choice::default()
            };
        }
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
        self.choice = self.first_choice();
        Ok(())
    }

    /// Make sure that the region of the plan is ours.
    pub(super) fn carve(&mut self) -> bool {
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
