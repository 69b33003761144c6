//! One device's memory: arenas per stream and per graph pool over shared address space, growth, and steps.
//!
//! Ownership rule that makes reuse safe: every free unit belongs to exactly one arena, and every use of it is ordered
//! before the next work of that arena's stream. A block freed on its own stream goes back at once; a block that other
//! streams read waits for their events; memory that moves from one arena to another does so behind an event of the
//! old owner that the new owner waits for. During a capture no event is recorded or queried.

mod choose;
mod graphs;
mod grow;
mod region;
mod report;
mod state;
mod step;
mod streams;
mod types;

use std::collections::VecDeque;

use crate::arena::{Arena, NO_SLOT, Place};
use crate::device::{Device, EventId, StreamId};
use crate::error::{PoolError, Result};
use crate::hash::AddressMap;
use crate::replay::Replay;
use crate::stats::{Gauge, Histogram};
use crate::{SPAN, UNIT};

pub use choose::{Choice, PlanRule, Reason};
pub use graphs::PoolId;
pub use report::HeapStats;
pub use state::HeapState;
use step::{Mark, UNRECORDED};
pub use step::{StepReport, StepSource};
pub use types::{Counters, HeapConfig, LABEL_NAMES, LABELS, Label};

#[derive(Debug, Clone, Copy)]
struct Segment {
    base: u64,
    start: u32,
    units: u32,
    keep: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    Stream(StreamId),
    Graph(PoolId),
}

#[derive(Debug)]
struct Owned {
    owner: Owner,
    arena: Arena,
    live: u64,
}

#[derive(Debug, Clone, Copy)]
struct Block {
    place: Place,
    requested: u64,
    stream: StreamId,
    owner: u32,
    label: Label,
    recorded: bool,
    /// Plan slot, or [`NO_SLOT`].
    slot: u32,
    /// Serial of the plan the slot belongs to.
    plan: u32,
    /// Step and index of the recording.
    step: u32,
    index: u32,
}

#[derive(Debug)]
struct Pending {
    block: Block,
    events: Vec<EventId>,
}

#[derive(Debug)]
struct Carved {
    replay: Replay,
    serial: u32,
    /// First unit of the region, `None` while the region is not carved.
    region: Option<u32>,
    units: u32,
}

/// Memory of one device.
pub struct Heap {
    device: Box<dyn Device>,
    config: HeapConfig,
    segments: Vec<Segment>,
    capacity: u32,
    pages: Vec<u64>,
    page_units: u32,
    touched: Gauge,
    reserved: Gauge,
    arenas: Vec<Owned>,
    by_stream: Vec<(StreamId, u32)>,
    live: AddressMap<Block>,
    recorded: AddressMap<Vec<StreamId>>,
    pending: Vec<(StreamId, VecDeque<Pending>)>,
    waiting: usize,
    deferred: Vec<(Block, Vec<StreamId>)>,
    graphs: Vec<graphs::GraphPool>,
    active: Vec<graphs::ActiveCapture>,
    suspects: Vec<graphs::ActiveCapture>,
    plan: Option<Carved>,
    plan_serial: u32,
    residual: AddressMap<u16>,
    step: step::Step,
    rule: PlanRule,
    choice: Choice,
    labels: [Gauge; LABELS],
    requests: Gauge,
    requested: Gauge,
    granted: Gauge,
    counters: Counters,
    /// Time of allocations, filled by the caller that owns the clock.
    pub alloc_time: Histogram,
    /// Time of frees, filled by the caller that owns the clock.
    pub free_time: Histogram,
    last_oom: Option<String>,
}

impl Heap {
    /// A heap over `device`. Nothing is taken from the device before the first allocation.
    pub fn new(device: Box<dyn Device>, config: HeapConfig) -> Self {
        let page_units = (device.commit_bytes() / UNIT).max(1) as u32;
        Self {
            device,
            config,
            segments: Vec::new(),
            capacity: 0,
            pages: Vec::new(),
            page_units,
            touched: Gauge::default(),
            reserved: Gauge::default(),
            arenas: Vec::new(),
            by_stream: Vec::new(),
            live: AddressMap::default(),
            recorded: AddressMap::default(),
            pending: Vec::new(),
            waiting: 0,
            deferred: Vec::new(),
            graphs: Vec::new(),
            active: Vec::new(),
            suspects: Vec::new(),
            plan: None,
            plan_serial: 0,
            residual: AddressMap::default(),
            step: step::Step::default(),
            rule: PlanRule::default(),
            choice: Choice::default(),
            labels: [Gauge::default(); LABELS],
            requests: Gauge::default(),
            requested: Gauge::default(),
            granted: Gauge::default(),
            counters: Counters::default(),
            alloc_time: Histogram::default(),
            free_time: Histogram::default(),
            last_oom: None,
        }
    }

    /// Reserve the initial block now instead of at the first allocation. The stream that allocates first is the main
    /// stream: it owns the memory that nobody uses.
    pub fn start(&mut self, stream: StreamId) -> Result<()> {
        if self.arenas.is_empty() {
            self.add_arena(Owner::Stream(stream));
            if self.config.initial_bytes > 0 {
                let bytes = self.config.initial_bytes.div_ceil(SPAN) * SPAN;
                self.add_segment(bytes, true)?;
            }
        }
        Ok(())
    }

    /// Allocate `size` bytes for `stream`; returns the address.
    pub fn alloc(&mut self, size: u64, stream: StreamId, label: Label) -> Result<u64> {
        if size == 0 || size > 1 << 47 {
            return Err(PoolError::BadSize { size, max: 1 << 47 });
        }
        if self.arenas.is_empty() {
            self.start(stream)?;
        }
        // The default stream cannot capture, so it need not be asked about captures that are only suspected.
        if (!self.active.is_empty() || (!self.suspects.is_empty() && stream != 0))
            && let Some(owner) = self.capturing_owner(stream)
        {
            return self.alloc_online(size, stream, label, owner, UNRECORDED);
        }
        if self.waiting > 0 || !self.deferred.is_empty() {
            self.poll();
        }
        if label == Label::Ephemeral && self.step.records(stream) {
            return self.alloc_in_step(size, stream);
        }
        let owner = self.owner_of(stream);
        self.alloc_online(size, stream, label, owner, UNRECORDED)
    }

    /// Free the block at `address`.
    pub fn free(&mut self, address: u64) -> Result<()> {
        let Some(block) = self.live.remove(&address) else {
            self.counters.unknown_frees += 1;
            return Err(PoolError::UnknownBlock { address });
        };
        self.labels[block.label as usize].sub(block.requested);
        self.requested.sub(block.requested);
        self.granted.sub(block.place.granted);
        self.requests.sub(1);
        if block.recorded {
            let streams = self.recorded.remove(&address).unwrap_or_default();
            self.free_after(block, streams);
        } else {
            self.give(block);
        }
        Ok(())
    }

    /// Whether `address` is the start of a live block of this heap.
    pub fn owns(&self, address: u64) -> bool {
        self.live.contains_key(&address)
    }

    /// Change the label of the live block at `address`, for statistics and reports; the block stays where it is.
    pub fn relabel(&mut self, address: u64, label: Label) -> bool {
        let Some(block) = self.live.get_mut(&address) else {
            return false;
        };
        self.labels[block.label as usize].sub(block.requested);
        self.labels[label as usize].add(block.requested);
        block.label = label;
        true
    }

    /// Requested bytes of the live block at `address`.
    pub fn size_of(&self, address: u64) -> Option<u64> {
        self.live.get(&address).map(|b| b.requested)
    }

    /// Base and size of the reservation that holds `address`.
    pub fn segment_of(&self, address: u64) -> Option<(u64, u64)> {
        self.segments
            .iter()
            .map(|s| (s.base, u64::from(s.units) * UNIT))
            .find(|&(base, bytes)| address >= base && address - base < bytes)
    }

    /// The device, for tests and for calls outside the hot path.
    pub fn device(&mut self) -> &mut dyn Device {
        self.device.as_mut()
    }

    fn alloc_online(
        &mut self,
        size: u64,
        stream: StreamId,
        label: Label,
        owner: u32,
        mark: Mark,
    ) -> Result<u64> {
        let high = label != Label::Ephemeral;
        let place = match self.place(owner, size, high) {
            Some(place) => place,
            None => self.place_slowly(owner, size, stream, label, high)?,
        };
        Ok(self.adopt(place, size, stream, label, owner, NO_SLOT, mark))
    }

    /// Take a place from an arena and make sure that memory is behind it.
    fn place(&mut self, owner: u32, size: u64, high: bool) -> Option<Place> {
        let place = self.arenas[owner as usize].arena.take(size, high)?;
        if self.touch(place.offset, place.granted) {
            return Some(place);
        }
        self.arenas[owner as usize].arena.undo(place);
        None
    }

    /// Book a block that was just placed.
    #[allow(clippy::too_many_arguments)]
    fn adopt(
        &mut self,
        place: Place,
        size: u64,
        stream: StreamId,
        label: Label,
        owner: u32,
        slot: u32,
        (step, index): Mark,
    ) -> u64 {
        let address = self.address_of(place.offset);
        self.labels[label as usize].add(size);
        self.requested.add(size);
        self.granted.add(place.granted);
        self.requests.add(1);
        self.arenas[owner as usize].live += 1;
        let block = Block {
            place,
            requested: size,
            stream,
            owner,
            label,
            recorded: false,
            slot,
            plan: self.plan_serial,
            step,
            index,
        };
        let before = self.live.insert(address, block);
        debug_assert!(before.is_none(), "address {address:#x} given out twice");
        address
    }

    /// Return a block whose every use is ordered before the next work of its owner's stream.
    fn give(&mut self, block: Block) {
        self.arenas[block.owner as usize].live -= 1;
        self.step.freed(block.step, block.index);
        if block.slot == NO_SLOT {
            self.arenas[block.owner as usize].arena.give(block.place);
        } else {
            self.give_slot(block);
        }
    }

    fn add_arena(&mut self, owner: Owner) -> u32 {
        let index = self.arenas.len() as u32;
        self.arenas.push(Owned {
            owner,
            arena: Arena::new(self.capacity, self.config.slab_max),
            live: 0,
        });
        if let Owner::Stream(stream) = owner {
            self.by_stream.push((stream, index));
        }
        index
    }

    fn owner_of(&mut self, stream: StreamId) -> u32 {
        match self.by_stream.iter().find(|&&(s, _)| s == stream) {
            Some(&(_, owner)) => owner,
            None => self.add_arena(Owner::Stream(stream)),
        }
    }

    fn address_of(&self, offset: u64) -> u64 {
        let unit = (offset / UNIT) as u32;
        let segment = self
            .segments
            .iter()
            .find(|s| unit >= s.start && unit - s.start < s.units)
            .copied()
            .unwrap_or(Segment {
                base: 0,
                start: 0,
                units: 0,
                keep: false,
            });
        segment.base + offset - u64::from(segment.start) * UNIT
    }
}
