//! What lies where in the shared memory.

use crate::protocol::{JobState, SlotHead};
use crate::sync::{AtomicU32, AtomicU64};

pub(super) const MAGIC: u64 = 0x4c46_5249_4e47_0003;

pub(super) const PAGE: usize = 4096;

/// Counters that each worker keeps.
pub const COUNTERS: usize = 16;

/// Job that waits for no slot.
pub const NO_SLOT: u32 = u32::MAX;

/// Sizes of a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Shape {
    /// Number of slots.
    pub slots: u32,
    /// Items a slot can have.
    pub items: u32,
    /// Jobs that can be outstanding.
    pub jobs: u32,
    /// Bytes of a job's payload.
    pub payload: u32,
    /// Workers that can take part, numbered from 0.
    pub workers: u32,
    /// Bytes of a slot; rounded up to whole pages.
    pub slot_bytes: u64,
}

#[repr(C)]
pub(super) struct Header {
    pub(super) magic: u64,
    pub(super) shape: Shape,
    /// Bumped when there is work to claim.
    pub(super) work: AtomicU32,
    /// Bumped when a slot is ready or a job has failed.
    pub(super) progress: AtomicU32,
    /// Set when workers shall leave.
    pub(super) stop: AtomicU32,
    /// First job that may be unfinished, and one past the last; serial numbers.
    pub(super) head: AtomicU64,
    pub(super) tail: AtomicU64,
}

#[repr(C, align(64))]
pub(super) struct JobHead {
    pub(super) state: JobState,
    pub(super) length: AtomicU32,
    pub(super) waits_for: AtomicU32,
    /// Bytes of the error, for failed jobs.
    pub(super) error_length: AtomicU32,
    pub(super) claimed_at: AtomicU64,
    pub(super) serial: AtomicU64,
}

pub(super) struct Plan {
    pub(super) heads: usize,
    pub(super) marks: usize,
    pub(super) jobs: usize,
    pub(super) payloads: usize,
    pub(super) errors: usize,
    pub(super) counters: usize,
    pub(super) data: usize,
    pub(super) total: usize,
}

pub(super) fn plan(shape: Shape) -> Option<Plan> {
    let up = |value: usize| value.checked_next_multiple_of(PAGE);
    let (slots, jobs) = (shape.slots as usize, shape.jobs as usize);
    let heads = PAGE;
    let marks = up(heads.checked_add(slots.checked_mul(size_of::<SlotHead>())?)?)?;
    let job_heads = up(marks.checked_add(slots.checked_mul(shape.items as usize)?)?)?;
    let payloads = up(job_heads.checked_add(jobs.checked_mul(size_of::<JobHead>())?)?)?;
    let errors = up(payloads.checked_add(jobs.checked_mul(shape.payload as usize)?)?)?;
    let counters = up(errors.checked_add(jobs.checked_mul(shape.payload as usize)?)?)?;
    let data = up(counters.checked_add((shape.workers as usize).checked_mul(COUNTERS * 8)?)?)?;
    let total = data.checked_add(slots.checked_mul(shape.slot_bytes as usize)?)?;
    Some(Plan {
        heads,
        marks,
        jobs: job_heads,
        payloads,
        errors,
        counters,
        data,
        total,
    })
}
