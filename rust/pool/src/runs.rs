//! Free runs of equal units: exact best fit, coalesced by address.
//!
//! A run of `n` units belongs to order `floor(log2 n)`. Each order keeps its runs sorted by (length, start); a bitmap
//! tells which orders have any. A request looks in its own order for the shortest run that holds it, then takes the
//! first run of the next order that has one: exact best fit, lowest address among equals, O(log r) to find and a
//! short move to update. Boundary tags at both ends of every free run make coalescing O(1) in the number of runs.

const ORDERS: usize = 32;
/// With more free runs than this, a block that stays is placed in the best fit instead of the highest run.
const MOST_RUNS: usize = 512;

/// Index of the free runs of one address range.
#[derive(Debug, Clone)]
pub struct RunIndex {
    /// Length of the run at its first and at its last unit; zero at every other unit.
    tags: Vec<u32>,
    orders: [Vec<u64>; ORDERS],
    filled: u32,
    free_units: u64,
}

fn key(len: u32, start: u32) -> u64 {
    (u64::from(len) << 32) | u64::from(start)
}

fn split_key(key: u64) -> (u32, u32) {
    ((key >> 32) as u32, key as u32)
}

fn order_of(len: u32) -> usize {
    len.ilog2() as usize
}

impl RunIndex {
    /// An index over `units` units, none of them free yet; [`RunIndex::give`] adds the free ones.
    pub fn new(units: u32) -> Self {
        Self {
            tags: vec![0; units as usize],
            orders: std::array::from_fn(|_| Vec::new()),
            filled: 0,
            free_units: 0,
        }
    }

    /// Widen the address range to `units` units.
    pub fn extend_to(&mut self, units: u32) {
        if units as usize > self.tags.len() {
            self.tags.resize(units as usize, 0);
        }
    }

    /// Units of the address range.
    pub fn capacity(&self) -> u32 {
        self.tags.len() as u32
    }

    /// Free units.
    pub fn free_units(&self) -> u64 {
        self.free_units
    }

    /// Length of the longest free run in units.
    pub fn largest(&self) -> u32 {
        if self.filled == 0 {
            return 0;
        }
        let order = 31 - self.filled.leading_zeros() as usize;
        self.orders[order].last().map_or(0, |&k| split_key(k).0)
    }

    /// Number of free runs in every order.
    pub fn runs_by_order(&self) -> Vec<usize> {
        self.orders.iter().map(Vec::len).collect()
    }

    /// Free runs as (start, length), in address order.
    pub fn free_runs(&self) -> Vec<(u32, u32)> {
        let mut runs: Vec<(u32, u32)> = self
            .orders
            .iter()
            .flatten()
            .map(|&k| {
                let (len, start) = split_key(k);
                (start, len)
            })
            .collect();
        runs.sort_unstable();
        runs
    }

    /// Take the shortest run that holds `units`, lowest address first; its tail goes back.
    pub fn take(&mut self, units: u32) -> Option<u32> {
        let (order, position) = self.find(units)?;
        let (len, start) = split_key(self.orders[order][position]);
        self.remove_at(order, position, start, len);
        if len > units {
            self.insert(start + units, len - units);
        }
        Some(start)
    }

    /// Place a block that will stay: in a run of exactly its size, else at the end of the highest run that holds it and
    /// ends at or below `top`, else as [`RunIndex::take`] does. O(runs).
    pub fn take_far(&mut self, units: u32, top: u32) -> Option<u32> {
        let (order, position) = self.find(units)?;
        let (len, start) = split_key(self.orders[order][position]);
        let best = start + len <= top;
        let far = if len == units {
            None
        } else if self.runs() > MOST_RUNS {
            best.then_some((len, start))
        } else {
            self.highest(units, top)
        };
        let Some((len, start)) = far else {
            self.remove_at(order, position, start, len);
            if len > units {
                self.insert(start + units, len - units);
            }
            return Some(start);
        };
        self.remove(start, len);
        if len > units {
            self.insert(start, len - units);
        }
        Some(start + len - units)
    }

    /// The highest run of at least `units` that ends at or below `top`, as (length, start).
    fn highest(&self, units: u32, top: u32) -> Option<(u32, u32)> {
        let mut best: Option<(u32, u32)> = None;
        for order in order_of(units.max(1))..ORDERS {
            if self.filled >> order == 0 {
                break;
            }
            for &k in &self.orders[order] {
                let (len, start) = split_key(k);
                let fits = len >= units && len <= top && start <= top - len;
                if fits && best.is_none_or(|(_, highest)| start > highest) {
                    best = Some((len, start));
                }
            }
        }
        best
    }

    fn runs(&self) -> usize {
        self.orders.iter().map(Vec::len).sum()
    }

    /// Take `units` from the end of the highest run that holds them. O(runs).
    pub fn take_high(&mut self, units: u32) -> Option<u32> {
        let best = self
            .orders
            .iter()
            .flatten()
            .map(|&k| split_key(k))
            .filter(|&(len, _)| len >= units)
            .max_by_key(|&(_, start)| start)?;
        let (len, start) = best;
        self.remove(start, len);
        if len > units {
            self.insert(start, len - units);
        }
        Some(start + len - units)
    }

    /// Take exactly `[start, start + units)`; false when it is not entirely free. O(runs).
    pub fn take_range(&mut self, start: u32, units: u32) -> bool {
        let Some((len, at)) = self
            .orders
            .iter()
            .flatten()
            .map(|&k| split_key(k))
            .find(|&(len, at)| at <= start && start - at < len && len - (start - at) >= units)
        else {
            return false;
        };
        self.remove(at, len);
        if start > at {
            self.insert(at, start - at);
        }
        let end = start + units;
        if at + len > end {
            self.insert(end, at + len - end);
        }
        true
    }

    /// Put `[start, start + units)` back and merge it with its free neighbours; returns the merged run.
    pub fn give(&mut self, start: u32, units: u32) -> (u32, u32) {
        debug_assert!(units > 0 && (start + units) as usize <= self.tags.len());
        let (mut first, mut len) = (start, units);
        if first > 0 {
            let left = self.tags[first as usize - 1];
            if left > 0 {
                self.remove(first - left, left);
                first -= left;
                len += left;
            }
        }
        let end = start + units;
        if let Some(&right) = self.tags.get(end as usize)
            && right > 0
        {
            self.remove(end, right);
            len += right;
        }
        self.insert(first, len);
        (first, len)
    }

    /// Take every free run out.
    pub fn drain(&mut self) -> Vec<(u32, u32)> {
        let runs = self.free_runs();
        for &(start, len) in &runs {
            self.remove(start, len);
        }
        runs
    }

    fn find(&self, units: u32) -> Option<(usize, usize)> {
        let order = order_of(units.max(1));
        if self.filled & (1 << order) != 0 {
            let runs = &self.orders[order];
            let position = runs.partition_point(|&k| k < key(units, 0));
            if position < runs.len() {
                return Some((order, position));
            }
        }
        let above = if order + 1 < ORDERS {
            self.filled >> (order + 1) << (order + 1)
        } else {
            0
        };
        (above != 0).then(|| (above.trailing_zeros() as usize, 0))
    }

    fn insert(&mut self, start: u32, len: u32) {
        let order = order_of(len);
        let runs = &mut self.orders[order];
        let wanted = key(len, start);
        let position = runs.partition_point(|&k| k < wanted);
        runs.insert(position, wanted);
        self.filled |= 1 << order;
        self.tags[start as usize] = len;
        self.tags[(start + len - 1) as usize] = len;
        self.free_units += u64::from(len);
    }

    fn remove(&mut self, start: u32, len: u32) {
        let order = order_of(len);
        let wanted = key(len, start);
        let position = self.orders[order].partition_point(|&k| k < wanted);
        debug_assert_eq!(self.orders[order].get(position), Some(&wanted));
        self.remove_at(order, position, start, len);
    }

    fn remove_at(&mut self, order: usize, position: usize, start: u32, len: u32) {
        self.orders[order].remove(position);
        if self.orders[order].is_empty() {
            self.filled &= !(1 << order);
        }
        self.tags[start as usize] = 0;
        self.tags[(start + len - 1) as usize] = 0;
        self.free_units -= u64::from(len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_the_shortest_run_that_fits_and_coalesces_back() {
        let mut index = RunIndex::new(64);
        index.give(0, 64);
        let a = index.take(8).unwrap();
        let b = index.take(4).unwrap();
        let c = index.take(8).unwrap();
        assert_eq!((a, b, c), (0, 8, 12));
        index.give(b, 4);
        assert_eq!(
            index.take(4),
            Some(8),
            "the hole of four units is the best fit"
        );
        index.give(a, 8);
        index.give(c, 8);
        index.give(8, 4);
        assert_eq!(index.free_runs(), vec![(0, 64)]);
        assert_eq!(index.largest(), 64);
    }

    #[test]
    fn takes_a_named_range_and_the_high_end() {
        let mut index = RunIndex::new(32);
        index.give(0, 32);
        assert!(index.take_range(10, 4));
        assert!(!index.take_range(12, 4));
        assert_eq!(index.take_high(6), Some(26));
        assert_eq!(index.free_runs(), vec![(0, 10), (14, 12)]);
    }
}
