//! Plan or run fit: which of the two serves the next steps.
//!
//! A plan needs the least memory, but its region is fixed, a changed step has to be planned again, and blocks lie where
//! the plan puts them instead of where memory was used last. Run fit needs none of that and on most steps wastes little.
//! So with a rule the heap watches what run fit holds beyond what the steps need, and changes to a plan when that is
//! more than a share of what it holds, or when memory is tight. It never changes back: the same shapes would waste it
//! again.

use super::report::bytes;
use super::{Heap, StepReport, StepSource};
use crate::error::Result;
use crate::planner;
use crate::{SPAN, UNIT};

/// Memory is tight when less than a twentieth of what is held could still be had.
const TIGHT: u64 = 20;

/// When a plan serves the steps.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum PlanRule {
    /// From the second step on.
    #[default]
    Always,
    /// Never: run fit alone.
    Never,
    /// When it saves more than this share of what run fit holds, or anything at all while memory is tight.
    Above(f64),
}

/// Why the next step is served as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Reason {
    /// No step was seen yet.
    #[default]
    Profiling,
    /// The settings say so.
    Asked,
    /// Run fit holds little more than the steps need.
    LittleToSave,
    /// The plan needs less by more than the accepted share.
    Saves,
    /// The plan needs less, and there is hardly any memory left.
    MemoryTight,
    /// A plan was made and would not need less.
    PlanNotSmaller,
    /// The steps run on a stream whose memory a plan cannot be carved from.
    OtherStream,
}

/// What serves the next step, with the figures that decided it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Choice {
    /// Whether a plan is in force.
    pub planned: bool,
    /// Why.
    pub reason: Reason,
    /// Bytes held when it was decided.
    pub held: u64,
    /// Bytes of it that a plan would save (at most, while none was made).
    pub spare: u64,
    /// Largest need of a step that was looked at.
    pub(super) need: u64,
}

impl PlanRule {
    fn share(self) -> f64 {
        match self {
            Self::Above(share) => share,
            _ => 0.0,
        }
    }
}

impl Choice {
    /// Source of a step for which no plan exists.
    pub(super) fn source_without_plan(self) -> StepSource {
        match self.reason {
            Reason::Profiling => StepSource::Profiled,
            _ => StepSource::RunFit,
        }
    }

    /// The reason in words.
    pub fn text(self, rule: PlanRule) -> String {
        let share = 100.0 * self.spare as f64 / self.held.max(1) as f64;
        let least = 100.0 * rule.share();
        match self.reason {
            Reason::Profiling => "no step was recorded yet".into(),
            Reason::Asked => "the settings or a loaded plan ask for it".into(),
            Reason::LittleToSave if share > least => format!(
                "run fit holds {} more than the steps need, which is less than one piece of device memory",
                bytes(self.spare)
            ),
            Reason::LittleToSave => format!(
                "{share:.1} % of what run fit holds is more than the steps need; a plan is used from {least:.1} %"
            ),
            Reason::Saves => format!(
                "the plan needs {share:.1} % less than run fit held; accepted are {least:.1} %"
            ),
            Reason::MemoryTight => {
                format!("memory is tight and the plan needs {share:.1} % less than run fit held")
            }
            Reason::OtherStream => {
                "the steps do not run on the stream that allocated first, whose memory a plan \
                                    needs; make the model on the stream that trains it"
                    .into()
            }
            Reason::PlanNotSmaller => format!(
                "a plan would save {share:.1} % of what run fit holds; one is used from {least:.1} %"
            ),
        }
    }
}

impl Heap {
    /// Set the rule. A plan that is in force stays.
    pub fn set_plan_rule(&mut self, rule: PlanRule) {
        self.rule = rule;
        if self.plan.is_none() {
            self.choice = self.first_choice();
        }
    }

    /// The choice before any step was seen.
    pub(super) fn first_choice(&self) -> Choice {
        Choice {
            reason: if self.rule == PlanRule::Never {
                Reason::Asked
            } else {
                Reason::Profiling
            },
            ..Choice::default()
        }
    }

    /// The rule in force.
    pub fn plan_rule(&self) -> PlanRule {
        self.rule
    }

    /// What serves the next step, and why.
    pub fn choice(&self) -> Choice {
        self.choice
    }

    /// Decide at the end of a step that run fit served. True when a plan was put in force.
    pub(super) fn choose(&mut self, report: &StepReport) -> Result<bool> {
        let held = self.held();
        // What lives on now, and what came and went in the step.
        let need = self.requested.current + report.peak_requested;
        let before = self.choice;
        if before.reason != Reason::Profiling && held == before.held && need <= before.need {
            return Ok(false);
        }
        if self.owner_of(self.step.stream) != 0 {
            self.choice = Choice {
                reason: Reason::OtherStream,
                held,
                need: need.max(before.need),
                ..Choice::default()
            };
            return Ok(false);
        }
        let page = u64::from(self.page_units) * UNIT;
        let floor = need.div_ceil(page) * page + self.free_elsewhere();
        let mut choice = Choice {
            planned: false,
            reason: Reason::LittleToSave,
            held,
            spare: held.saturating_sub(floor),
            need: need.max(before.need),
        };
        let share = (self.rule.share() * held as f64) as u64;
        let tight = choice.spare <= share && self.room() < held / TIGHT;
        let least = if tight { 0 } else { share }.max(page);
        let mut planned = false;
        if choice.spare > least {
            let made = planner::plan(&self.step.log)?;
            let beyond = made.high_water.saturating_sub(report.peak_requested);
            choice.spare = choice.spare.saturating_sub(beyond);
            choice.reason = Reason::PlanNotSmaller;
            if choice.spare > least && self.use_plan(made)? {
                planned = true;
                choice.planned = true;
                choice.reason = if tight {
                    Reason::MemoryTight
                } else {
                    Reason::Saves
                };
            }
        }
        self.choice = choice;
        Ok(planned)
    }

    /// Bytes that the steps so far made the heap hold: committed, or touched where all is reserved at once.
    fn held(&self) -> u64 {
        if self.device.commits() {
            self.reserved.current
        } else {
            self.touched.current
        }
    }

    /// Bytes that could still be had: untouched, within the limit, and on the device.
    fn room(&mut self) -> u64 {
        let inside = self.reserved.current.saturating_sub(self.held());
        if self.config.grow_bytes == 0 && !self.device.commits() {
            return inside;
        }
        let allowed = self
            .config
            .limit_bytes
            .saturating_sub(self.reserved.current);
        let device = self.device.available().unwrap_or(u64::MAX);
        inside.saturating_add(allowed.min(device) / SPAN * SPAN)
    }

    /// Free bytes that a plan of the main stream cannot use: those of graph pools and of other streams.
    fn free_elsewhere(&self) -> u64 {
        let others = self.arenas.iter().skip(1);
        others.map(|a| a.arena.free_bytes()).sum()
    }
}
