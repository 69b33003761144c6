//! Offline placement of one step.
//!
//! Greedy: items in some order, each at the lowest offset that is free for its whole life. Three orders are tried
//! (size, life, size times life) and the lowest result is kept; then the items that stick out of it are placed first and
//! the rest again, a bounded number of times. O(n * placed) per try over contiguous arrays.

use crate::error::{PoolError, Result};
use crate::trace::{Item, peak_live};
use crate::{QUANTUM, round_up};

/// Offset of an item that is not part of the plan.
pub const UNPLANNED: u64 = u64::MAX;

/// Offsets for one step, by allocation index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// Items the plan was made for (sizes are maxima over the shapes seen).
    pub items: Vec<Item>,
    /// Byte offset of each item, [`UNPLANNED`] for items that stay.
    pub offsets: Vec<u64>,
    /// Bytes the plan needs.
    pub high_water: u64,
    /// Name of the greedy order that won.
    pub order: &'static str,
}

/// Placed items: sorted by offset as a whole, and by time in buckets, so that a short life is compared only with what
/// lives near it.
struct Placed {
    offset: Vec<u64>,
    end: Vec<u64>,
    from: Vec<u32>,
    until: Vec<u32>,
    buckets: Vec<Vec<(u64, u64, u32, u32)>>,
    per_bucket: u32,
    near: Vec<(u64, u64)>,
}

/// Buckets of allocation indices.
const BUCKETS: u32 = 128;
/// Lives over more buckets than this are compared with everything.
const SHORT_LIFE: u32 = 8;

/// Plan `items`. Deterministic.
pub fn plan(items: &[Item]) -> Result<Plan> {
    for (index, item) in items.iter().enumerate() {
        if !item.stays() && (item.end as usize <= index || item.end as usize > items.len()) {
            return Err(PoolError::BadPlan {
                what: format!(
                    "item {index} ends at {}, allowed {}..={}",
                    item.end,
                    index + 1,
                    items.len()
                ),
            });
        }
        if item.size > 1 << 48 {
            return Err(PoolError::BadSize {
                size: item.size,
                max: 1 << 48,
            });
        }
    }
    let planned: Vec<u32> = (0..items.len() as u32)
        .filter(|&i| !items[i as usize].stays())
        .collect();
    let floor = round_up(peak_live(items), QUANTUM).unwrap_or(u64::MAX);
    let mut best: Option<(Plan, Vec<u32>)> = None;
    for (name, order) in orders(items, &planned) {
        let (offsets, high_water) = place(items, &order);
        if best.as_ref().is_none_or(|(b, _)| high_water < b.high_water) {
            best = Some((
                Plan {
                    items: items.to_vec(),
                    offsets,
                    high_water,
                    order: name,
                },
                order,
            ));
        }
        if high_water <= floor {
            break;
        }
    }
    let (plan, order) = best.ok_or_else(|| PoolError::BadPlan {
        what: "no order was tried".into(),
    })?;
    Ok(improve(plan, order, floor))
}

/// Work of all improving tries together, in comparisons (a fraction of a second).
const IMPROVE_BUDGET: usize = 300_000_000;
const MOST_TRIES: usize = 60;

/// Place the items that define the high-water mark first, and the rest again in the same order.
fn improve(mut best: Plan, mut order: Vec<u32>, floor: u64) -> Plan {
    let tries = (IMPROVE_BUDGET / (order.len() * order.len()).max(1)).min(MOST_TRIES);
    let (mut offsets, mut high_water) = (best.offsets.clone(), best.high_water);
    for _ in 0..tries {
        // Within a thousandth of what any placement needs there is nothing left to gain.
        if best.high_water <= floor + floor / 1000 {
            break;
        }
        let sticks_out = |&i: &u32| {
            let size = best.items[i as usize].size.max(1).div_ceil(QUANTUM) * QUANTUM;
            offsets[i as usize] + size == high_water
        };
        let (mut first, rest): (Vec<u32>, Vec<u32>) = order.iter().partition(|i| sticks_out(i));
        first.extend(rest);
        order = first;
        (offsets, high_water) = place(&best.items, &order);
        if high_water < best.high_water {
            best.offsets.clone_from(&offsets);
            best.high_water = high_water;
        }
    }
    best
}

fn orders(items: &[Item], planned: &[u32]) -> Vec<(&'static str, Vec<u32>)> {
    let life = |i: u32| u64::from(items[i as usize].end - i);
    let size = |i: u32| items[i as usize].size;
    let sorted = |rank: &dyn Fn(u32) -> (u128, u128)| {
        let mut order = planned.to_vec();
        order.sort_by_key(|&i| {
            let (first, second) = rank(i);
            (std::cmp::Reverse(first), std::cmp::Reverse(second), i)
        });
        order
    };
    vec![
        (
            "size",
            sorted(&|i| (u128::from(size(i)), u128::from(life(i)))),
        ),
        (
            "life",
            sorted(&|i| (u128::from(life(i)), u128::from(size(i)))),
        ),
        (
            "size x life",
            sorted(&|i| (u128::from(size(i)) * u128::from(life(i)), 0)),
        ),
    ]
}

fn place(items: &[Item], order: &[u32]) -> (Vec<u64>, u64) {
    let mut offsets = vec![UNPLANNED; items.len()];
    let mut high_water = 0;
    let mut placed = Placed::new(items.len(), order.len());
    for &index in order {
        let item = items[index as usize];
        let size = item.size.max(1).div_ceil(QUANTUM) * QUANTUM;
        let offset = placed.lowest_gap(index, item.end, size);
        offsets[index as usize] = offset;
        high_water = high_water.max(offset + size);
        placed.add(offset, size, index, item.end);
    }
    (offsets, high_water)
}

impl Placed {
    fn new(items: usize, capacity: usize) -> Self {
        Self {
            offset: Vec::with_capacity(capacity),
            end: Vec::with_capacity(capacity),
            from: Vec::with_capacity(capacity),
            until: Vec::with_capacity(capacity),
            buckets: vec![Vec::new(); BUCKETS as usize],
            per_bucket: (items as u32 / BUCKETS + 1).max(1),
            near: Vec::new(),
        }
    }

    fn bucket_range(&self, from: u32, until: u32) -> (u32, u32) {
        (
            from / self.per_bucket,
            ((until - 1) / self.per_bucket).min(BUCKETS - 1),
        )
    }

    fn add(&mut self, offset: u64, size: u64, from: u32, until: u32) {
        let at = self.offset.partition_point(|&o| o <= offset);
        self.offset.insert(at, offset);
        self.end.insert(at, offset + size);
        self.from.insert(at, from);
        self.until.insert(at, until);
        let (first, last) = self.bucket_range(from, until);
        for bucket in first..=last {
            self.buckets[bucket as usize].push((offset, offset + size, from, until));
        }
    }

    /// Lowest offset where `size` bytes are free for the whole life `[from, until)`.
    fn lowest_gap(&mut self, from: u32, until: u32, size: u64) -> u64 {
        let (first, last) = self.bucket_range(from, until);
        if last - first < SHORT_LIFE {
            self.near.clear();
            for bucket in first..=last {
                for &(offset, end, other_from, other_until) in &self.buckets[bucket as usize] {
                    // An item of several buckets counts in the first one that both lives touch.
                    let counted = (other_from / self.per_bucket).max(first) == bucket;
                    if counted && other_from < until && from < other_until {
                        self.near.push((offset, end));
                    }
                }
            }
            self.near.sort_unstable();
            return first_gap(self.near.iter().copied(), size);
        }
        let lives = self.from.iter().zip(&self.until);
        let blocks = self.offset.iter().zip(&self.end).zip(lives);
        let together = blocks
            .filter(|&(_, (&other_from, &other_until))| other_from < until && from < other_until)
            .map(|((&offset, &end), _)| (offset, end));
        first_gap(together, size)
    }
}

/// First gap of `size` bytes between blocks sorted by offset.
fn first_gap(blocks: impl Iterator<Item = (u64, u64)>, size: u64) -> u64 {
    let mut top = 0_u64;
    for (offset, end) in blocks {
        if offset >= top && offset - top >= size {
            return top;
        }
        top = top.max(end);
    }
    top
}

/// Merge two recordings of the same step: per-index largest size and longest life; whether a block stays is decided by
/// the newer one. `None` when the number of allocations differs, because then the indices do not mean the same blocks.
pub fn merge(older: &[Item], newer: &[Item]) -> Option<Vec<Item>> {
    (older.len() == newer.len()).then(|| {
        let pairs = older.iter().zip(newer);
        pairs
            .map(|(x, y)| Item {
                size: x.size.max(y.size),
                end: if x.stays() { y.end } else { x.end.max(y.end) },
            })
            .collect()
    })
}

/// Check that no two items that live together overlap. O(n log n) for real plans.
pub fn verify(plan: &Plan) -> Result<()> {
    let mut live: std::collections::BTreeMap<u64, (u64, usize)> = std::collections::BTreeMap::new();
    let mut ending: Vec<Vec<usize>> = vec![Vec::new(); plan.items.len() + 1];
    for (index, item) in plan.items.iter().enumerate() {
        for &gone in &ending[index] {
            live.remove(&plan.offsets[gone]);
        }
        let offset = plan.offsets[index];
        if offset == UNPLANNED {
            continue;
        }
        let end = offset + item.size.max(1);
        let hit = live
            .range(..end)
            .next_back()
            .filter(|&(_, &(other_end, _))| other_end > offset);
        if let Some((_, &(_, other))) = hit {
            return Err(PoolError::BadPlan {
                what: format!("items {other} and {index} overlap"),
            });
        }
        if end > plan.high_water {
            return Err(PoolError::BadPlan {
                what: format!("item {index} ends past the high-water mark"),
            });
        }
        live.insert(offset, (end, index));
        if item.stays() {
            return Err(PoolError::BadPlan {
                what: format!("item {index} stays but has an offset"),
            });
        }
        ending[item.end as usize].push(index);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_that_never_live_together_share_bytes() {
        let items = [
            Item { size: 4096, end: 1 },
            Item { size: 8192, end: 3 },
            Item { size: 4096, end: 3 },
            Item {
                size: 99,
                end: Item::STAYS,
            },
        ];
        let plan = plan(&items).unwrap();
        assert_eq!(plan.high_water, 8192 + 4096);
        assert_eq!(plan.offsets[3], UNPLANNED);
        verify(&plan).unwrap();
    }

    #[test]
    fn merging_keeps_maxima_and_refuses_other_lengths() {
        let a = [Item { size: 10, end: 1 }, Item { size: 20, end: 2 }];
        let b = [Item { size: 30, end: 2 }, Item { size: 5, end: 2 }];
        let merged = merge(&a, &b).unwrap();
        assert_eq!(
            merged,
            vec![Item { size: 30, end: 2 }, Item { size: 20, end: 2 }]
        );
        assert!(merge(&a, &b[..1]).is_none());
    }
}
