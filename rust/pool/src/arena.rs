//! Run fit with a slab: the allocator of one stream, of one graph pool, or of a whole simulated device.

use crate::error::{PoolError, Result};
use crate::hash::AddressMap;
use crate::lives::{Birth, Lives, UNFOLLOWED};
use crate::runs::RunIndex;
use crate::slab::{Slab, SlabPlace};
use crate::{SLAB_MAX, SPAN, UNIT, round_up};

/// Slot number of a block that is not in the slab.
pub const NO_SLOT: u32 = u32::MAX;

/// Where a block lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Byte offset in the address range.
    pub offset: u64,
    /// Granted bytes.
    pub granted: u64,
    /// Slab slot, or [`NO_SLOT`].
    pub slot: u32,
    /// When it was placed, for blocks whose life is followed.
    pub birth: Birth,
}

/// Free memory of one owner: runs of 64 KiB units and the slab over them.
#[derive(Debug, Clone)]
pub struct Arena {
    /// Free runs.
    pub runs: RunIndex,
    slab: Slab,
    slab_max: u64,
    lives: Lives,
    /// Blocks whose life is followed.
    followed: u32,
    /// End of the highest block that was not placed at the high end.
    top: u32,
}

impl Arena {
    /// An empty arena over an address range of `units` units; requests up to `slab_max` bytes use the slab.
    pub fn new(units: u32, slab_max: u64) -> Self {
        Self {
            runs: RunIndex::new(units),
            slab: Slab::default(),
            slab_max: slab_max.min(SPAN),
            lives: Lives::default(),
            followed: 0,
            top: 0,
        }
    }

    /// A step begins: what was learned about the lives of blocks holds within one step.
    pub fn forget_lives(&mut self) {
        self.lives.forget();
    }

    /// Place `size` bytes, from the high end when `high` (blocks that stay), or `None` when nothing fits.
    pub fn take(&mut self, size: u64, high: bool) -> Option<Place> {
        if size <= self.slab_max {
            if let Some(place) = self.slab.take(size) {
                return Some(place.into());
            }
            // A span at the high end keeps small long-lived objects out of the holes of large blocks.
            let start = self.runs.take_high((SPAN / UNIT) as u32);
            if let Some(start) = start {
                self.slab.add_span(u64::from(start) * UNIT);
                return self.slab.take(size).map(Into::into);
            }
            // The range has no room for a span any more: a plain run may still fit.
        }
        let units = u32::try_from(size.div_ceil(UNIT).max(1)).ok()?;
        if high {
            let start = self.runs.take_high(units)?;
            return Some(Place::run(start, units, UNFOLLOWED));
        }
        let (stays, birth) = self.lives.begin(units);
        let start = if stays {
            self.runs.take_far(units, self.top)
        } else {
            self.runs.take(units)
        };
        let Some(start) = start else {
            self.lives.cancel(birth);
            return None;
        };
        self.top = self.top.max(start + units);
        self.followed += 1;
        Some(Place::run(start, units, birth))
    }

    /// Give a block back that could not be used after all.
    pub fn undo(&mut self, mut place: Place) {
        if place.birth != UNFOLLOWED {
            self.lives.cancel(place.birth);
            self.followed -= 1;
            place.birth = UNFOLLOWED;
        }
        self.give(place);
    }

    /// Give a block back.
    pub fn give(&mut self, place: Place) {
        if place.slot == NO_SLOT {
            if place.birth != UNFOLLOWED {
                self.lives.end(place.birth);
                self.followed -= 1;
                if self.followed == 0 {
                    self.lives.forget();
                }
            }
            self.runs
                .give((place.offset / UNIT) as u32, (place.granted / UNIT) as u32);
        } else if let Some(base) = self.slab.give(SlabPlace {
            offset: place.offset,
            slot: place.slot,
            granted: place.granted,
        }) {
            self.runs.give((base / UNIT) as u32, (SPAN / UNIT) as u32);
        }
    }

    /// Units a request needs as one free run when the slab cannot serve it.
    pub fn units_for(&self, size: u64) -> u64 {
        if size <= self.slab_max {
            SPAN / UNIT
        } else {
            size.div_ceil(UNIT)
        }
    }

    /// Free bytes, those inside spans included.
    pub fn free_bytes(&self) -> u64 {
        self.runs.free_units() * UNIT + self.slab.free_bytes()
    }

    /// Largest free run in bytes.
    pub fn largest_free(&self) -> u64 {
        u64::from(self.runs.largest()) * UNIT
    }

    /// Slab spans in use.
    pub fn spans(&self) -> usize {
        self.slab.spans()
    }
}

impl Place {
    /// A place of whole units.
    fn run(start: u32, units: u32, birth: Birth) -> Self {
        Self {
            offset: u64::from(start) * UNIT,
            granted: u64::from(units) * UNIT,
            slot: NO_SLOT,
            birth,
        }
    }
}

impl From<SlabPlace> for Place {
    fn from(place: SlabPlace) -> Self {
        Self {
            offset: place.offset,
            granted: place.granted,
            slot: place.slot,
            birth: UNFOLLOWED,
        }
    }
}

/// Common face of the placement policies that are compared on traces.
pub trait Placement {
    /// Place `size` bytes and return the byte offset.
    fn alloc(&mut self, size: u64) -> Result<u64>;
    /// Free the block at `offset`.
    fn free(&mut self, offset: u64) -> Result<()>;
    /// Highest number of bytes the policy ever needed from the device.
    fn high_water(&self) -> u64;
    /// Bytes granted to live blocks.
    fn granted(&self) -> u64;
    /// Free bytes the policy holds below its high-water mark.
    fn free_bytes(&self) -> u64;
    /// Largest free run below the high-water mark.
    fn largest_free(&self) -> u64;
}

/// Run fit with slab over one growing address range: the large blocks grow from offset zero, the spans of small
/// objects have a range of their own, and the high-water mark is the sum of both.
#[derive(Debug)]
pub struct RunFit {
    large: RunIndex,
    slab: Slab,
    span_runs: RunIndex,
    slab_max: u64,
    blocks: AddressMap<Place>,
    large_top: u64,
    span_top: u64,
    granted: u64,
    limit: u64,
    /// `None`: plain best fit.
    lives: Option<Lives>,
    followed: u32,
}

/// First byte of the range of spans: far above every simulated large block.
const SPAN_BASE: u64 = 1 << 46;

impl RunFit {
    /// A pool of at most `limit` bytes of large blocks; requests up to `slab_max` bytes use the slab.
    pub fn new(limit: u64, slab_max: u64) -> Self {
        let units = (limit / UNIT).min(1 << 25) as u32;
        let mut large = RunIndex::new(units);
        if units > 0 {
            large.give(0, units);
        }
        let span_units = (1 << 34) / SPAN;
        let mut span_runs = RunIndex::new(span_units as u32);
        span_runs.give(0, span_units as u32);
        Self {
            large,
            slab: Slab::default(),
            span_runs,
            slab_max: slab_max.min(SPAN),
            blocks: AddressMap::default(),
            large_top: 0,
            span_top: 0,
            granted: 0,
            limit: u64::from(units) * UNIT,
            lives: Some(Lives::default()),
            followed: 0,
        }
    }

    /// Place every block by best fit alone, whatever its expected life; for comparison.
    #[must_use]
    pub fn plain(mut self) -> Self {
        self.lives = None;
        self
    }

    /// A pool that never runs out in practice (2 TiB), as simulations need it.
    pub fn unlimited() -> Self {
        Self::new(1 << 41, SLAB_MAX)
    }

    fn place(&mut self, size: u64) -> Option<Place> {
        if size <= self.slab_max {
            if let Some(place) = self.slab.take(size) {
                return Some(place.into());
            }
            let span = self.span_runs.take(1)?;
            self.span_top = self.span_top.max((u64::from(span) + 1) * SPAN);
            self.slab.add_span(SPAN_BASE + u64::from(span) * SPAN);
            return self.slab.take(size).map(Into::into);
        }
        let units = u32::try_from(size.div_ceil(UNIT)).ok()?;
        let (stays, birth) = match &mut self.lives {
            Some(lives) => lives.begin(units),
            None => (false, UNFOLLOWED),
        };
        let start = if stays {
            self.large.take_far(units, (self.large_top / UNIT) as u32)
        } else {
            self.large.take(units)
        };
        let Some(start) = start else {
            if let Some(lives) = &mut self.lives {
                lives.cancel(birth);
            }
            return None;
        };
        let end = (u64::from(start) + u64::from(units)) * UNIT;
        self.large_top = self.large_top.max(end);
        self.followed += 1;
        Some(Place::run(start, units, birth))
    }
}

impl Placement for RunFit {
    fn alloc(&mut self, size: u64) -> Result<u64> {
        if size == 0 || round_up(size, UNIT).is_none_or(|s| s > self.limit) {
            return Err(PoolError::BadSize {
                size,
                max: self.limit,
            });
        }
        let place = self.place(size).ok_or(PoolError::OutOfMemory {
            size,
            free: self.large.free_units() * UNIT,
            largest: u64::from(self.large.largest()) * UNIT,
        })?;
        self.granted += place.granted;
        self.blocks.insert(place.offset, place);
        Ok(place.offset)
    }

    fn free(&mut self, offset: u64) -> Result<()> {
        let place = self
            .blocks
            .remove(&offset)
            .ok_or(PoolError::UnknownBlock { address: offset })?;
        self.granted -= place.granted;
        if place.slot == NO_SLOT {
            self.followed -= 1;
            if let Some(lives) = &mut self.lives {
                lives.end(place.birth);
                if self.followed == 0 {
                    lives.forget();
                }
            }
            self.large
                .give((offset / UNIT) as u32, (place.granted / UNIT) as u32);
        } else if let Some(base) = self.slab.give(SlabPlace {
            offset,
            slot: place.slot,
            granted: place.granted,
        }) {
            self.span_runs.give(((base - SPAN_BASE) / SPAN) as u32, 1);
        }
        Ok(())
    }

    fn high_water(&self) -> u64 {
        self.large_top + self.span_top
    }

    fn granted(&self) -> u64 {
        self.granted
    }

    fn free_bytes(&self) -> u64 {
        self.high_water() - self.granted
    }

    fn largest_free(&self) -> u64 {
        let top = (self.large_top / UNIT) as u32;
        self.large
            .free_runs()
            .iter()
            .filter(|&&(start, _)| start < top)
            .map(|&(start, len)| u64::from(len.min(top - start)) * UNIT)
            .max()
            .unwrap_or(0)
    }
}
