//! Behaviour models of the two allocators that PyTorch ships: segment caching and expandable segments.
//!
//! Written from the published rules (rounding, pool split, segment sizes, split remainders), for comparison on traces.
//! Device memory is unlimited here, so the flush before an out-of-memory error is not part of the model.

use std::collections::{BTreeMap, BTreeSet};

use crate::arena::Placement;
use crate::error::{PoolError, Result};
use crate::hash::AddressMap;

const SMALL_MAX: u64 = 1 << 20;
const SMALL_SEGMENT: u64 = 2 << 20;
const LARGE_SEGMENT: u64 = 20 << 20;
const LARGE_MIN: u64 = 10 << 20;
const SEGMENT_ROUND: u64 = 2 << 20;

fn rounded(size: u64) -> u64 {
    size.max(1).div_ceil(512) * 512
}

/// Best fit over address-ordered blocks; a free block merges with free neighbours of the same segment.
#[derive(Debug, Default)]
struct BlockList {
    /// start -> (size, segment, free)
    blocks: BTreeMap<u64, (u64, u32, bool)>,
    free: BTreeSet<(u64, u64)>,
    free_bytes: u64,
}

impl BlockList {
    fn add_free(&mut self, start: u64, size: u64, segment: u32) {
        let (mut at, mut len) = (start, size);
        if let Some((&left, &(left_len, left_segment, true))) =
            self.blocks.range(..start).next_back()
            && left + left_len == start
            && left_segment == segment
        {
            self.drop_free(left, left_len);
            at = left;
            len += left_len;
        }
        if let Some(&(right_len, right_segment, true)) = self.blocks.get(&(start + size))
            && right_segment == segment
        {
            self.drop_free(start + size, right_len);
            len += right_len;
        }
        self.blocks.insert(at, (len, segment, true));
        self.free.insert((len, at));
        self.free_bytes += len;
    }

    fn drop_free(&mut self, start: u64, size: u64) {
        self.free.remove(&(size, start));
        self.blocks.remove(&start);
        self.free_bytes -= size;
    }

    /// Best fit; the remainder is split off when it is at least `keep`.
    fn take(&mut self, size: u64, keep: u64, most: u64) -> Option<(u64, u64)> {
        let &(len, start) = self.free.range((size, 0)..).next()?;
        if len > most {
            return None;
        }
        let segment = self.blocks[&start].1;
        self.drop_free(start, len);
        let granted = if len - size >= keep { size } else { len };
        self.blocks.insert(start, (granted, segment, false));
        if len > granted {
            self.blocks
                .insert(start + granted, (len - granted, segment, true));
            self.free.insert((len - granted, start + granted));
            self.free_bytes += len - granted;
        }
        Some((start, granted))
    }

    fn release(&mut self, start: u64) -> Option<u64> {
        let &(size, segment, free) = self.blocks.get(&start)?;
        if free {
            return None;
        }
        self.blocks.remove(&start);
        self.add_free(start, size, segment);
        Some(size)
    }

    fn largest(&self) -> u64 {
        self.free.last().map_or(0, |&(len, _)| len)
    }
}

/// Segment caching: 2 MiB segments for small requests, 20 MiB or rounded segments for large ones.
#[derive(Debug, Default)]
pub struct CachingSim {
    small: BlockList,
    large: BlockList,
    live: AddressMap<bool>,
    reserved: u64,
    segments: u32,
    granted: u64,
}

impl Placement for CachingSim {
    fn alloc(&mut self, size: u64) -> Result<u64> {
        if size == 0 {
            return Err(PoolError::BadSize {
                size,
                max: u64::MAX,
            });
        }
        let need = rounded(size);
        let is_small = need <= SMALL_MAX;
        // Small remainders stay usable from 512 bytes on, large ones from just above 1 MiB on.
        let keep = if is_small { 512 } else { SMALL_MAX + 1 };
        let segment_size = if is_small {
            SMALL_SEGMENT
        } else if need < LARGE_MIN {
            LARGE_SEGMENT
        } else {
            need.div_ceil(SEGMENT_ROUND) * SEGMENT_ROUND
        };
        let list = if is_small {
            &mut self.small
        } else {
            &mut self.large
        };
        let (start, granted) = if let Some(found) = list.take(need, keep, u64::MAX) {
            found
        } else {
            // One gap between segments: they never merge.
            let base = self.reserved + u64::from(self.segments) * SEGMENT_ROUND;
            list.add_free(base, segment_size, self.segments);
            self.segments += 1;
            self.reserved += segment_size;
            list.take(need, keep, u64::MAX).ok_or(PoolError::BadSize {
                size,
                max: u64::MAX,
            })?
        };
        self.granted += granted;
        self.live.insert(start, is_small);
        Ok(start)
    }

    fn free(&mut self, offset: u64) -> Result<()> {
        let unknown = PoolError::UnknownBlock { address: offset };
        let is_small = self.live.remove(&offset).ok_or_else(|| unknown.clone())?;
        let list = if is_small {
            &mut self.small
        } else {
            &mut self.large
        };
        self.granted -= list.release(offset).ok_or(unknown)?;
        Ok(())
    }

    fn high_water(&self) -> u64 {
        self.reserved
    }

    fn granted(&self) -> u64 {
        self.granted
    }

    fn free_bytes(&self) -> u64 {
        self.small.free_bytes + self.large.free_bytes
    }

    fn largest_free(&self) -> u64 {
        self.small.largest().max(self.large.largest())
    }
}

/// Expandable segments: one growing range per pool, mapped page by page (2 MiB small, 20 MiB large).
#[derive(Debug, Default)]
pub struct ExpandableSim {
    small: BlockList,
    large: BlockList,
    small_top: u64,
    large_top: u64,
    live: AddressMap<bool>,
    granted: u64,
}

/// First byte of the large range.
const LARGE_BASE: u64 = 1 << 44;

impl Placement for ExpandableSim {
    fn alloc(&mut self, size: u64) -> Result<u64> {
        if size == 0 {
            return Err(PoolError::BadSize {
                size,
                max: LARGE_BASE,
            });
        }
        let need = rounded(size);
        let is_small = need <= SMALL_MAX;
        let (list, top, page, base, keep) = if is_small {
            (&mut self.small, &mut self.small_top, SMALL_SEGMENT, 0, 512)
        } else {
            (
                &mut self.large,
                &mut self.large_top,
                LARGE_SEGMENT,
                LARGE_BASE,
                SMALL_MAX + 1,
            )
        };
        let (start, granted) = if let Some(found) = list.take(need, keep, u64::MAX) {
            found
        } else {
            // The free block at the end of the range grows until it holds the request.
            let end = base + *top;
            let tail = list
                .blocks
                .range(..end)
                .next_back()
                .and_then(|(&at, &(len, _, free))| (free && at + len == end).then_some(len))
                .unwrap_or(0);
            let more = (need - tail).div_ceil(page) * page;
            list.add_free(end, more, 0);
            *top += more;
            list.take(need, keep, u64::MAX).ok_or(PoolError::BadSize {
                size,
                max: LARGE_BASE,
            })?
        };
        self.granted += granted;
        self.live.insert(start, is_small);
        Ok(start)
    }

    fn free(&mut self, offset: u64) -> Result<()> {
        let unknown = PoolError::UnknownBlock { address: offset };
        let is_small = self.live.remove(&offset).ok_or_else(|| unknown.clone())?;
        let list = if is_small {
            &mut self.small
        } else {
            &mut self.large
        };
        self.granted -= list.release(offset).ok_or(unknown)?;
        Ok(())
    }

    fn high_water(&self) -> u64 {
        self.small_top + self.large_top
    }

    fn granted(&self) -> u64 {
        self.granted
    }

    fn free_bytes(&self) -> u64 {
        self.small.free_bytes + self.large.free_bytes
    }

    fn largest_free(&self) -> u64 {
        self.small.largest().max(self.large.largest())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_of_eleven_mebibytes_gets_its_own_rounded_segment() {
        let mut sim = CachingSim::default();
        let a = sim.alloc(11 << 20).unwrap();
        assert_eq!(sim.high_water(), 12 << 20);
        sim.free(a).unwrap();
        sim.alloc(5 << 20).unwrap();
        assert_eq!(sim.high_water(), 12 << 20, "the cached segment is split");
        sim.alloc(512).unwrap();
        assert_eq!(
            sim.high_water(),
            14 << 20,
            "small requests have their own segments"
        );
    }

    #[test]
    fn an_expandable_range_grows_its_last_free_block() {
        let mut sim = ExpandableSim::default();
        let a = sim.alloc(19 << 20).unwrap();
        sim.free(a).unwrap();
        sim.alloc(30 << 20).unwrap();
        assert_eq!(sim.high_water(), 40 << 20);
    }
}
