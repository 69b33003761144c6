//! A recorded sequence of allocations and frees.

use crate::error::{PoolError, Result};
use crate::hash::AddressMap;

/// One event of a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// Block `id` of `size` bytes is allocated.
    Alloc {
        /// Identifier, unique among live blocks.
        id: u64,
        /// Requested bytes.
        size: u64,
    },
    /// Block `id` is freed.
    Free {
        /// Identifier of a live block.
        id: u64,
    },
}

/// One allocation of a step. Time is counted in allocations: a block is live from its own allocation up to the moment
/// when `end` allocations have been made. Frees between two allocations commute, so this loses nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Item {
    /// Requested bytes.
    pub size: u64,
    /// Number of allocations made when the block was freed; [`Item::STAYS`] when it outlived the trace.
    pub end: u32,
}

impl Item {
    /// The block outlived the trace: it is not part of the ephemeral plan.
    pub const STAYS: u32 = u32::MAX;

    /// Whether the block outlived the trace.
    pub fn stays(&self) -> bool {
        self.end == Self::STAYS
    }
}

/// Check a trace and turn it into one item per allocation, in allocation order.
pub fn items(events: &[Event]) -> Result<Vec<Item>> {
    let mut live: AddressMap<u32> = AddressMap::default();
    let mut out: Vec<Item> = Vec::new();
    for (position, event) in events.iter().enumerate() {
        match *event {
            Event::Alloc { id, size } => {
                if size == 0 {
                    return Err(bad(position, format!("block {id} has size 0")));
                }
                if live.insert(id, out.len() as u32).is_some() {
                    return Err(bad(
                        position,
                        format!("block {id} is allocated while it is live"),
                    ));
                }
                out.push(Item {
                    size,
                    end: Item::STAYS,
                });
            }
            Event::Free { id } => {
                let index = live
                    .remove(&id)
                    .ok_or_else(|| bad(position, format!("block {id} is freed but not live")))?;
                out[index as usize].end = out.len() as u32;
            }
        }
    }
    Ok(out)
}

fn bad(event: usize, what: String) -> PoolError {
    PoolError::BadTrace { event, what }
}

/// Largest sum of the sizes of blocks that are live together, blocks that stay left out.
pub fn peak_live(items: &[Item]) -> u64 {
    let mut ending: Vec<u64> = vec![0; items.len() + 1];
    let (mut live, mut peak) = (0_u64, 0_u64);
    for (index, item) in items.iter().enumerate() {
        live -= ending[index];
        if item.stays() {
            continue;
        }
        live += item.size;
        ending[item.end as usize] += item.size;
        peak = peak.max(live);
    }
    peak
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lifetimes_are_counted_in_allocations() {
        let events = [
            Event::Alloc { id: 7, size: 10 },
            Event::Alloc { id: 8, size: 20 },
            Event::Free { id: 7 },
            Event::Alloc { id: 7, size: 5 },
            Event::Free { id: 8 },
        ];
        let items = items(&events).unwrap();
        assert_eq!(items[0], Item { size: 10, end: 2 });
        assert_eq!(items[1], Item { size: 20, end: 3 });
        assert!(items[2].stays());
        assert_eq!(peak_live(&items), 30);
    }

    #[test]
    fn a_double_free_is_named() {
        let events = [
            Event::Alloc { id: 1, size: 1 },
            Event::Free { id: 1 },
            Event::Free { id: 1 },
        ];
        let error = items(&events).unwrap_err().to_string();
        assert_eq!(error, "trace event 2: block 1 is freed but not live");
    }
}
