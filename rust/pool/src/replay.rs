//! Guarded replay of a plan by allocation index.
//!
//! A planned hit is O(1): the index names the slot, and a slot is free when its direct predecessors (the planned
//! blocks that lay last on any of its bytes) are gone. That is exact as long as every earlier block of the step was
//! served from its slot. After the first block that was not, the live slots are kept in an ordered map and every
//! later hit of the step is checked against it, which is exact without any assumption.

use std::collections::BTreeMap;

use crate::error::Result;
use crate::planner::{Plan, UNPLANNED, verify};

/// Why an allocation was not served from its slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub enum Miss {
    /// More allocations than the plan knows.
    BeyondEnd = 0,
    /// The block at this index stays, so it has no slot.
    Unplanned = 1,
    /// The request is larger than the planned size.
    Larger = 2,
    /// The slot still holds a live block.
    Busy = 3,
    /// A request that the plan does not know between two that it knows.
    Extra = 4,
}

/// Number of [`Miss`] reasons.
pub const MISSES: usize = 5;
/// Names of the reasons, in order.
pub const MISS_NAMES: [&str; MISSES] = ["beyond_end", "unplanned", "larger", "busy", "extra"];

/// Counters of a replay.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReplayCounters {
    /// Planned hits.
    pub hits: u64,
    /// Misses by reason.
    pub misses: [u64; MISSES],
    /// Times the index was moved to where the request was found in the plan.
    pub resyncs: u64,
}

/// How far ahead and behind a request is looked for when it is not the one the plan expects.
const LOOK_AHEAD: usize = 16;
const LOOK_BEHIND: usize = 4;
/// Unexpected requests in a row after which a step counts as one of other shapes.
const MOST_ODD: u32 = 4;
/// Extra requests in one step after which it counts as one of larger shapes.
const MOST_EXTRAS: u32 = 32;

/// A plan in use.
#[derive(Debug, Clone)]
pub struct Replay {
    plan: Plan,
    /// Direct predecessors of item i: `edges[starts[i]..starts[i + 1]]`.
    starts: Vec<u32>,
    edges: Vec<u32>,
    live: Vec<bool>,
    live_count: u32,
    next: u32,
    /// Unexpected sizes in a row.
    odd: u32,
    /// Extra requests in this step.
    extras: u32,
    /// Live slots by offset, kept only after a block was not served from its slot.
    exact: Option<BTreeMap<u64, (u64, u32)>>,
    /// Counters since the plan was made.
    pub counters: ReplayCounters,
}

impl Replay {
    /// Check `plan` and prepare its guards.
    pub fn new(plan: Plan) -> Result<Self> {
        verify(&plan)?;
        let (starts, edges) = predecessors(&plan);
        let count = plan.items.len();
        Ok(Self {
            plan,
            starts,
            edges,
            live: vec![false; count],
            live_count: 0,
            next: 0,
            odd: 0,
            extras: 0,
            exact: None,
            counters: ReplayCounters::default(),
        })
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Slots that hold a live block.
    pub fn live_count(&self) -> u32 {
        self.live_count
    }

    /// Live slots as (index, offset, planned size).
    pub fn live_slots(&self) -> Vec<(u32, u64, u64)> {
        (0..self.live.len())
            .filter(|&i| self.live[i])
            .map(|i| (i as u32, self.plan.offsets[i], self.plan.items[i].size))
            .collect()
    }

    /// Start a step at index 0. Blocks that survived the last step keep their slots and are guarded exactly.
    pub fn begin(&mut self) {
        self.next = 0;
        self.odd = 0;
        self.extras = 0;
        self.exact = None;
        if self.live_count > 0 {
            self.enter_exact();
        }
    }

    /// Serve the next allocation: its index and byte offset, or why not.
    pub fn take(&mut self, size: u64) -> std::result::Result<(u32, u64), Miss> {
        match self.plan.items.get(self.next as usize) {
            Some(item) if item.size != size => self.find(size, item.size)?,
            _ => self.odd = 0,
        }
        let index = self.next;
        self.next += 1;
        let outcome = self.check(index, size);
        match outcome {
            Ok(offset) => {
                self.live[index as usize] = true;
                self.live_count += 1;
                self.counters.hits += 1;
                if let Some(map) = &mut self.exact {
                    map.insert(
                        offset,
                        (offset + self.plan.items[index as usize].size, index),
                    );
                }
                Ok((index, offset))
            }
            Err(miss) => {
                self.counters.misses[miss as usize] += 1;
                if self.exact.is_none() && matches!(miss, Miss::Larger | Miss::Busy) {
                    self.enter_exact();
                }
                Err(miss)
            }
        }
    }

    /// Continue at `index`. Blocks that were skipped or are asked for again make every later hit checked exactly.
    pub fn seek(&mut self, index: u32) {
        if index != self.next {
            self.next = index;
            if self.exact.is_none() {
                self.enter_exact();
            }
        }
    }

    /// Give a slot back.
    pub fn give(&mut self, index: u32) {
        let slot = &mut self.live[index as usize];
        if std::mem::replace(slot, false) {
            self.live_count -= 1;
            if let Some(map) = &mut self.exact {
                map.remove(&self.plan.offsets[index as usize]);
            }
        }
    }

    /// The plan expects another size. Look for the request a little further on (the program left something out) or
    /// behind (it did something extra); when it is nowhere, a smaller one is served at this index (smaller shapes) and
    /// a larger one is an extra, until several in a row say that the shapes have grown.
    fn find(&mut self, size: u64, expected: u64) -> std::result::Result<(), Miss> {
        if self.odd < MOST_ODD {
            if let Some(index) = self.look_around(size) {
                self.counters.resyncs += 1;
                self.odd = 0;
                self.seek(index);
                return Ok(());
            }
            self.odd += 1;
            if size > expected && self.odd < MOST_ODD && self.extras < MOST_EXTRAS {
                self.extras += 1;
                self.counters.misses[Miss::Extra as usize] += 1;
                return Err(Miss::Extra);
            }
        }
        Ok(())
    }

    fn look_around(&self, size: u64) -> Option<u32> {
        let here = self.next as usize;
        let items = &self.plan.items;
        let ahead = here + 1..items.len().min(here + 1 + LOOK_AHEAD);
        let behind = here.saturating_sub(LOOK_BEHIND)..here;
        ahead
            .chain(behind.rev())
            .find(|&i| items[i].size == size)
            .map(|i| i as u32)
    }

    fn check(&self, index: u32, size: u64) -> std::result::Result<u64, Miss> {
        let i = index as usize;
        let Some(item) = self.plan.items.get(i) else {
            return Err(Miss::BeyondEnd);
        };
        let offset = self.plan.offsets[i];
        if offset == UNPLANNED {
            return Err(Miss::Unplanned);
        }
        if size > item.size {
            return Err(Miss::Larger);
        }
        let free = if let Some(map) = &self.exact {
            map.range(..offset + item.size)
                .next_back()
                .is_none_or(|(_, &(end, _))| end <= offset)
        } else {
            let before = &self.edges[self.starts[i] as usize..self.starts[i + 1] as usize];
            !self.live[i] && before.iter().all(|&b| !self.live[b as usize])
        };
        if free { Ok(offset) } else { Err(Miss::Busy) }
    }

    fn enter_exact(&mut self) {
        self.exact = Some(
            self.live_slots()
                .into_iter()
                .map(|(index, offset, size)| (offset, (offset + size, index)))
                .collect(),
        );
    }
}

/// For every item, the planned items that lay last on any of its bytes. Each item covers a range of an interval map
/// and replaces what it covers, so the total is at most three per item.
fn predecessors(plan: &Plan) -> (Vec<u32>, Vec<u32>) {
    let mut cover: BTreeMap<u64, (u64, u32)> = BTreeMap::new();
    let mut starts = Vec::with_capacity(plan.items.len() + 1);
    let mut edges = Vec::new();
    starts.push(0);
    for (index, item) in plan.items.iter().enumerate() {
        let offset = plan.offsets[index];
        if offset != UNPLANNED {
            let end = offset + item.size.max(1);
            let covered: Vec<(u64, (u64, u32))> = cover
                .range(..end)
                .rev()
                .take_while(|&(_, &(other_end, _))| other_end > offset)
                .map(|(&s, &v)| (s, v))
                .collect();
            for (start, (other_end, other)) in covered {
                edges.push(other);
                cover.remove(&start);
                if start < offset {
                    cover.insert(start, (offset, other));
                }
                if other_end > end {
                    cover.insert(end, (other_end, other));
                }
            }
            cover.insert(offset, (end, index as u32));
        }
        starts.push(edges.len() as u32);
    }
    (starts, edges)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planner::plan;
    use crate::trace::Item;

    fn replay() -> Replay {
        // 0 and 2 share bytes, 1 lives through all of it.
        let items = [
            Item { size: 4096, end: 2 },
            Item { size: 8192, end: 4 },
            Item { size: 4096, end: 4 },
            Item { size: 512, end: 4 },
        ];
        Replay::new(plan(&items).unwrap()).unwrap()
    }

    #[test]
    fn a_step_like_the_profiled_one_is_all_hits() {
        let mut replay = replay();
        for _ in 0..3 {
            replay.begin();
            let (a, _) = replay.take(4096).unwrap();
            let (b, _) = replay.take(8000).unwrap();
            replay.give(a);
            let (c, _) = replay.take(4096).unwrap();
            let (d, _) = replay.take(512).unwrap();
            for index in [b, c, d] {
                replay.give(index);
            }
        }
        assert_eq!(replay.counters.hits, 12);
        assert_eq!(replay.counters.misses, [0; MISSES]);
    }

    #[test]
    fn a_late_free_makes_the_slot_busy_and_a_larger_request_is_refused() {
        let mut replay = replay();
        replay.begin();
        let (a, _) = replay.take(4096).unwrap();
        replay.take(8192).unwrap();
        assert_eq!(replay.take(4096), Err(Miss::Busy), "item 0 was not freed");
        replay.give(a);
        for _ in 0..3 {
            assert_eq!(replay.take(9999), Err(Miss::Extra));
        }
        assert_eq!(
            replay.take(9999),
            Err(Miss::Larger),
            "four in a row: the shapes have grown"
        );
        assert_eq!(replay.take(1), Err(Miss::BeyondEnd));
    }

    #[test]
    fn a_left_out_and_an_extra_allocation_cost_no_more_than_themselves() {
        let sizes: Vec<u64> = (1..=20).map(|n| n * 1024).collect();
        let items: Vec<Item> = sizes.iter().map(|&size| Item { size, end: 20 }).collect();
        let mut replay = Replay::new(plan(&items).unwrap()).unwrap();
        let mut run = |requests: &[u64]| {
            replay.begin();
            let before = replay.counters.hits;
            let slots: Vec<u32> = requests
                .iter()
                .filter_map(|&s| replay.take(s).ok().map(|h| h.0))
                .collect();
            for &slot in &slots {
                replay.give(slot);
            }
            replay.counters.hits - before
        };
        let without: Vec<u64> = sizes.iter().copied().filter(|&s| s != 5 * 1024).collect();
        assert_eq!(run(&without), 19);
        let mut larger = sizes.clone();
        larger.insert(7, 999_999);
        assert_eq!(run(&larger), 20, "the extra one is served elsewhere");
        let mut smaller = sizes.clone();
        smaller.insert(7, 100);
        assert_eq!(
            run(&smaller),
            20,
            "the extra one took a slot, so one other is served elsewhere"
        );
        let half: Vec<u64> = sizes.iter().map(|s| s / 2 + 7).collect();
        assert_eq!(run(&half), 20, "smaller shapes use the same slots");
    }
}
