//! Small objects: best fit in quanta of 512 bytes inside 2 MiB spans.

use crate::runs::RunIndex;
use crate::{QUANTUM, SPAN};

const QUANTA_PER_SPAN: u32 = (SPAN / QUANTUM) as u32;
/// One quantum between spans is never free, so runs of different spans never merge.
const STRIDE: u32 = QUANTA_PER_SPAN + 1;

/// Spans cut into quanta. Knows nothing of where spans come from: the caller adds and removes them.
#[derive(Debug, Clone)]
pub struct Slab {
    index: RunIndex,
    /// First byte of each span; `None` for an unused slot.
    bases: Vec<Option<u64>>,
    unused: Vec<u32>,
}

/// Where a small object lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlabPlace {
    /// Byte offset of the object.
    pub offset: u64,
    /// Slot of its span.
    pub slot: u32,
    /// Granted bytes.
    pub granted: u64,
}

impl Default for Slab {
    fn default() -> Self {
        Self {
            index: RunIndex::new(0),
            bases: Vec::new(),
            unused: Vec::new(),
        }
    }
}

impl Slab {
    /// Place `size` bytes, or `None` when a new span is needed.
    pub fn take(&mut self, size: u64) -> Option<SlabPlace> {
        let quanta = size.div_ceil(QUANTUM).max(1) as u32;
        let at = self.index.take(quanta)?;
        let slot = at / STRIDE;
        let base = self.bases[slot as usize]?;
        let offset = base + u64::from(at % STRIDE) * QUANTUM;
        Some(SlabPlace {
            offset,
            slot,
            granted: u64::from(quanta) * QUANTUM,
        })
    }

    /// Give an object back; returns the base of its span when the span became empty and was removed.
    pub fn give(&mut self, place: SlabPlace) -> Option<u64> {
        let base = self.bases[place.slot as usize]?;
        let at = place.slot * STRIDE + ((place.offset - base) / QUANTUM) as u32;
        let (start, len) = self.index.give(at, (place.granted / QUANTUM) as u32);
        if len < QUANTA_PER_SPAN {
            return None;
        }
        let removed = self.index.take_range(start, len);
        debug_assert!(removed);
        self.bases[place.slot as usize] = None;
        self.unused.push(place.slot);
        Some(base)
    }

    /// Add an empty span that starts at byte `base`.
    pub fn add_span(&mut self, base: u64) {
        let slot = self.unused.pop().unwrap_or_else(|| {
            self.bases.push(None);
            self.bases.len() as u32 - 1
        });
        self.bases[slot as usize] = Some(base);
        self.index.extend_to((slot + 1) * STRIDE);
        self.index.give(slot * STRIDE, QUANTA_PER_SPAN);
    }

    /// Free bytes inside spans.
    pub fn free_bytes(&self) -> u64 {
        self.index.free_units() * QUANTUM
    }

    /// Spans in use.
    pub fn spans(&self) -> usize {
        self.bases.iter().flatten().count()
    }
}
