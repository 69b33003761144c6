//! Segments, memory behind them, and what happens when an arena has no room.

use super::{Heap, Label, Owner, Segment};
use crate::arena::Place;
use crate::device::StreamId;
use crate::error::{PoolError, Result};
use crate::{SPAN, UNIT};

/// Pages given back at once when a new peak needs memory (256 MiB in chunks of 32 MiB).
const RECLAIM_PAGES: usize = 8;

impl Heap {
    /// Reserve a new segment and give its units to the main arena.
    pub(super) fn add_segment(&mut self, bytes: u64, keep: bool) -> Result<()> {
        let room = self
            .config
            .limit_bytes
            .saturating_sub(self.reserved_bytes());
        if !self.device.commits() && bytes > room {
            return Err(PoolError::OutOfMemory {
                size: bytes,
                free: room,
                largest: room,
            });
        }
        let base = self.device.reserve(bytes)?;
        self.counters.device_allocs += 1;
        let units = (bytes / UNIT) as u32;
        if !self.device.commits() {
            self.reserved.add(bytes);
        }
        let top = self.segments.iter().map(|s| s.start + s.units).max();
        let adjacent = self.segments.last_mut().filter(|s| {
            s.keep == keep
                && Some(s.start + s.units) == top
                && s.base + u64::from(s.units) * UNIT == base
        });
        let start = if let Some(last) = adjacent {
            let start = last.start + last.units;
            last.units += units;
            start
        } else {
            let start = self.unit_range(units);
            self.segments.push(Segment {
                base,
                start,
                units,
                keep,
            });
            start
        };
        self.capacity = self.capacity.max(start + units);
        let words = (self.capacity / self.page_units) as usize / 64 + 1;
        self.pages.resize(words.max(self.pages.len()), 0);
        for owned in &mut self.arenas {
            owned.arena.runs.extend_to(self.capacity);
        }
        self.arenas[0].arena.runs.give(start, units);
        Ok(())
    }

    /// First of `units` unit numbers that no segment has, in the tightest gap: otherwise every cycle of growing and
    /// trimming would widen the index. One page stays free between segments, so that their runs never merge.
    fn unit_range(&self, units: u32) -> u32 {
        let gap = self.page_units;
        let mut taken: Vec<(u32, u32)> = self
            .segments
            .iter()
            .map(|s| (s.start, s.start + s.units))
            .collect();
        taken.sort_unstable();
        let mut best: Option<(u32, u32)> = None;
        let mut start = gap;
        for (from, to) in taken {
            let room = from.saturating_sub(start + gap);
            if room >= units && best.is_none_or(|(least, _)| room < least) {
                best = Some((room, start));
            }
            start = (to + gap).div_ceil(gap) * gap;
        }
        best.map_or(start, |(_, start)| start)
    }

    pub(super) fn reserved_bytes(&self) -> u64 {
        self.reserved.current
    }

    /// Put memory behind a block and count the pages it touches for the first time. False when the device refused.
    pub(super) fn touch(&mut self, offset: u64, bytes: u64) -> bool {
        let page = u64::from(self.page_units) * UNIT;
        let (first, last) = (offset / page, (offset + bytes - 1) / page);
        let mut at = first;
        while at <= last {
            let (word, bit) = ((at / 64) as usize, at % 64);
            let missing = !self.pages[word] >> bit;
            if missing == 0 {
                at += 64 - bit;
                continue;
            }
            at += u64::from(missing.trailing_zeros());
            if at > last {
                break;
            }
            if !self.touch_page(at, page) {
                return false;
            }
            at += 1;
        }
        true
    }

    fn touch_page(&mut self, at: u64, page: u64) -> bool {
        if self.device.commits() {
            if self.reserved.current + page > self.reserved.peak.min(self.config.limit_bytes) {
                // A new peak: memory committed elsewhere and free now is used first.
                self.reclaim_pages(RECLAIM_PAGES);
            }
            if self.reserved.current + page > self.config.limit_bytes {
                return false;
            }
            let address = self.address_of(at * page);
            if self.device.commit(address, page).is_err() {
                return false;
            }
            self.counters.commits += 1;
            self.reserved.add(page);
        }
        self.pages[(at / 64) as usize] |= 1 << (at % 64);
        self.touched.add(page);
        true
    }

    /// Decommit up to `most` free pages of the main arena, highest first; returns how many.
    fn reclaim_pages(&mut self, most: usize) -> usize {
        if !self.active.is_empty() {
            return 0;
        }
        let mut pages = self.free_committed_pages();
        let keep = pages.len().saturating_sub(most);
        let gone = pages.split_off(keep);
        self.decommit_pages(&gone)
    }

    /// The slow path: everything that can make room, cheapest first.
    pub(super) fn place_slowly(
        &mut self,
        owner: u32,
        size: u64,
        stream: StreamId,
        label: Label,
        high: bool,
    ) -> Result<Place> {
        if self.move_from_main(owner, size)
            && let Some(place) = self.place(owner, size, high)
        {
            return Ok(place);
        }
        if self.settle()
            && let Some(place) = self.place(owner, size, high)
        {
            return Ok(place);
        }
        if !self.step.open && self.dissolve_plan() {
            self.move_from_main(owner, size);
            if let Some(place) = self.place(owner, size, high) {
                return Ok(place);
            }
        }
        if self.grow_for(size) {
            self.move_from_main(owner, size);
            if let Some(place) = self.place(owner, size, high) {
                return Ok(place);
            }
        }
        if self.gather(owner)
            && let Some(place) = self.place(owner, size, high)
        {
            return Ok(place);
        }
        if self.dissolve_plan() {
            self.gather(owner);
            if let Some(place) = self.place(owner, size, high) {
                return Ok(place);
            }
        }
        if self.active.is_empty() && self.trim() > 0 && self.grow_for(size) {
            self.move_from_main(owner, size);
            if let Some(place) = self.place(owner, size, high) {
                return Ok(place);
            }
        }
        self.counters.ooms += 1;
        self.last_oom = Some(self.describe_oom(size, stream, label));
        let (free, largest) = self.free_and_largest();
        Err(PoolError::OutOfMemory {
            size,
            free,
            largest,
        })
    }

    /// Add a segment that holds `size`; whole free segments are given back first when together they would do.
    fn grow_for(&mut self, size: u64) -> bool {
        if self.config.grow_bytes == 0 || (self.device.commits() && !self.segments.is_empty()) {
            return false;
        }
        let need = size.max(SPAN).div_ceil(SPAN) * SPAN;
        if self.active.is_empty() && self.whole_free_bytes() >= need {
            self.trim();
        }
        let step = self.config.grow_bytes.div_ceil(SPAN) * SPAN;
        (step > need && self.add_segment(step, false).is_ok())
            || self.add_segment(need, false).is_ok()
    }

    fn is_whole_free(&self, segment: &Segment) -> bool {
        self.arenas[0]
            .arena
            .runs
            .free_runs()
            .iter()
            .any(|&(start, len)| {
                start <= segment.start && segment.start - start + segment.units <= len
            })
    }

    fn whole_free_bytes(&self) -> u64 {
        let free = self
            .segments
            .iter()
            .filter(|s| !s.keep && self.is_whole_free(s));
        free.map(|s| u64::from(s.units) * UNIT).sum()
    }

    /// Give wholly free segments (or committed pages) back to the device; returns the bytes given back. The segment
    /// reserved at the start stays. Waits for the device, because freed memory may still be in use there.
    pub fn trim(&mut self) -> u64 {
        self.purge_captures();
        if !self.active.is_empty() || self.arenas.is_empty() {
            return 0;
        }
        self.collect_released();
        self.settle();
        self.gather(0);
        if self.device.commits() {
            return self.decommit_free_pages();
        }
        let gone: Vec<usize> = (0..self.segments.len())
            .filter(|&i| !self.segments[i].keep && self.is_whole_free(&self.segments[i]))
            .collect();
        if gone.is_empty() || !self.wait_for_device() {
            return 0;
        }
        let mut bytes = 0;
        for &index in gone.iter().rev() {
            let segment = self.segments.remove(index);
            let taken = self.arenas[0]
                .arena
                .runs
                .take_range(segment.start, segment.units);
            debug_assert!(taken);
            let size = u64::from(segment.units) * UNIT;
            self.forget_pages(segment.start, segment.units);
            self.device.release(segment.base, size);
            self.counters.device_frees += 1;
            self.reserved.sub(size);
            bytes += size;
        }
        bytes
    }

    /// Pages of a range that have no memory behind them yet.
    pub(super) fn missing_pages(&self, start: u32, units: u32) -> usize {
        let pages = start / self.page_units..(start + units).div_ceil(self.page_units);
        pages
            .filter(|&at| self.pages[at as usize / 64] >> (at % 64) & 1 == 0)
            .count()
    }

    fn forget_pages(&mut self, start: u32, units: u32) {
        let page = u64::from(self.page_units) * UNIT;
        for at in start / self.page_units..(start + units).div_ceil(self.page_units) {
            let (word, bit) = ((at / 64) as usize, at % 64);
            if self.pages[word] >> bit & 1 == 1 {
                self.pages[word] &= !(1 << bit);
                self.touched.sub(page);
            }
        }
    }

    pub(super) fn decommit_free_pages(&mut self) -> u64 {
        let pages = self.free_committed_pages();
        self.decommit_pages(&pages) as u64 * u64::from(self.page_units) * UNIT
    }

    /// Pages that are wholly free in the main arena and have memory behind them, in address order.
    fn free_committed_pages(&self) -> Vec<u32> {
        let mut out = Vec::new();
        for (start, len) in self.arenas[0].arena.runs.free_runs() {
            let first = start.div_ceil(self.page_units);
            let last = (start + len) / self.page_units;
            out.extend(
                (first..last).filter(|&at| self.pages[at as usize / 64] >> (at % 64) & 1 == 1),
            );
        }
        out
    }

    fn decommit_pages(&mut self, gone: &[u32]) -> usize {
        if gone.is_empty() || !self.wait_for_device() {
            return 0;
        }
        let page = u64::from(self.page_units) * UNIT;
        for &at in gone {
            let address = self.address_of(u64::from(at) * page);
            self.device.decommit(address, page);
            self.forget_pages(at * self.page_units, self.page_units);
            self.reserved.sub(page);
        }
        gone.len()
    }

    pub(super) fn wait_for_device(&mut self) -> bool {
        self.counters.synchronizations += 1;
        self.device.synchronize().is_ok()
    }

    /// Move a run for `size` bytes from the main arena to `owner`, behind an event of the main stream.
    fn move_from_main(&mut self, owner: u32, size: u64) -> bool {
        if owner == 0 {
            return false;
        }
        let pages = (SPAN / UNIT) as u32;
        let Ok(units) = u32::try_from(self.arenas[owner as usize].arena.units_for(size)) else {
            return false;
        };
        let wanted = units.div_ceil(pages).saturating_mul(pages);
        let main = &mut self.arenas[0].arena.runs;
        let Some((start, len)) = main
            .take(wanted)
            .map(|s| (s, wanted))
            .or_else(|| main.take(units).map(|s| (s, units)))
        else {
            return false;
        };
        if !self.order_after(0, owner) {
            self.arenas[0].arena.runs.give(start, len);
            return false;
        }
        self.counters.transfers += 1;
        self.arenas[owner as usize].arena.runs.give(start, len);
        true
    }

    /// Move all free runs of every other stream to `owner`; the slab spans stay. True when anything moved.
    fn gather(&mut self, owner: u32) -> bool {
        let mut moved = false;
        for from in 0..self.arenas.len() as u32 {
            let is_stream = matches!(self.arenas[from as usize].owner, Owner::Stream(_));
            let free = self.arenas[from as usize].arena.runs.free_units();
            if from == owner || !is_stream || free == 0 || !self.order_after(from, owner) {
                continue;
            }
            for (start, len) in self.arenas[from as usize].arena.runs.drain() {
                self.arenas[owner as usize].arena.runs.give(start, len);
            }
            self.counters.transfers += 1;
            moved = true;
        }
        moved
    }
}
