//! Slots and jobs in shared memory, with waiting.
//!
//! One process owns the ring: it begins slots, publishes jobs and reads batches. Worker processes claim jobs, store
//! items and mark them. Nothing in here is a lock, so no process can leave one behind.

mod board;
mod layout;
mod owner;
mod slots;

use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;

pub use board::Claim;
pub use layout::{COUNTERS, NO_SLOT, Shape};
pub use owner::JobReport;

use crate::error::{Error, Result, argument};
use crate::futex;
use crate::shm::Mapping;
use crate::sync::{AtomicU32, AtomicU64, Ordering};
use layout::{Header, MAGIC, PAGE, Plan, plan};

/// The ring, in the owner or in a worker.
pub struct Ring {
    map: Mapping,
    shape: Shape,
    plan: Plan,
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring")
            .field("shape", &self.shape)
            .finish_non_exhaustive()
    }
}

impl Ring {
    /// Makes a ring. Memory is taken when slots are first used.
    pub fn create(mut shape: Shape) -> Result<Self> {
        for (name, value) in [
            ("slots", shape.slots),
            ("items", shape.items),
            ("jobs", shape.jobs),
            ("payload", shape.payload),
            ("workers", shape.workers),
        ] {
            if value == 0 || value > 1 << 20 {
                return Err(argument(name, value, format!("1 to {}", 1 << 20)));
            }
        }
        if shape.slot_bytes == 0 || shape.slot_bytes > 1 << 40 {
            return Err(argument("slot_bytes", shape.slot_bytes, "1 byte to 1 TiB"));
        }
        shape.slot_bytes = shape.slot_bytes.next_multiple_of(PAGE as u64);
        shape.payload = shape.payload.next_multiple_of(64);
        let plan = plan(shape)
            .ok_or_else(|| argument("slots", shape.slots, "a total below the address space"))?;
        let map = Mapping::create(plan.total)?;
        let ring = Self { map, shape, plan };
        let header = ring
            .map
            .at(0, size_of::<Header>())
            .ok_or_else(|| argument("ring", 0, "a page"))?;
        let start = Header {
            magic: MAGIC,
            shape,
            work: AtomicU32::new(0),
            progress: AtomicU32::new(0),
            stop: AtomicU32::new(0),
            head: AtomicU64::new(0),
            tail: AtomicU64::new(0),
        };
        // SAFETY: page-aligned, large enough, and no other process has the mapping yet. All other words start as zero,
        // which is FREE, EMPTY and PENDING.
        unsafe { header.cast::<Header>().write(start) };
        Ok(ring)
    }

    /// Joins a ring by its descriptor.
    pub fn attach(fd: OwnedFd) -> Result<Self> {
        let map = Mapping::map(fd)?;
        let wrong = |actual: String| Error::Layout {
            actual,
            expected: "a ring of this version".into(),
        };
        let header = map
            .at(0, size_of::<Header>())
            .ok_or_else(|| wrong(format!("{} bytes", map.len())))?
            .cast::<Header>();
        // SAFETY: inside the mapping and aligned; magic and shape never change after creation.
        let (magic, shape) = unsafe { ((*header.as_ptr()).magic, (*header.as_ptr()).shape) };
        if magic != MAGIC {
            return Err(wrong(format!("magic {magic:#x}")));
        }
        let plan = plan(shape).filter(|p| p.total == map.len());
        let plan = plan.ok_or_else(|| wrong(format!("{} bytes for {shape:?}", map.len())))?;
        Ok(Self { map, shape, plan })
    }

    /// Sizes.
    #[must_use]
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Descriptor to hand to workers.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.map.fd()
    }

    fn header(&self) -> &Header {
        // SAFETY: written at creation, aligned, inside the mapping, and only atomics change.
        unsafe {
            &*self
                .map
                .at(0, size_of::<Header>())
                .unwrap_or(NonNull::dangling())
                .cast::<Header>()
                .as_ptr()
        }
    }

    fn counter(&self, worker: usize, counter: usize) -> Option<&AtomicU64> {
        if worker >= self.shape.workers as usize || counter >= COUNTERS {
            return None;
        }
        let place = self
            .map
            .at(self.plan.counters + (worker * COUNTERS + counter) * 8, 8)?;
        // SAFETY: inside the mapping, aligned to 8, an atomic.
        Some(unsafe { &*place.cast::<AtomicU64>().as_ptr() })
    }

    /// Adds to a worker's counter.
    pub fn count(&self, worker: usize, counter: usize, amount: u64) {
        if let Some(word) = self.counter(worker, counter) {
            word.fetch_add(amount, Ordering::Relaxed);
        }
    }

    /// A worker's counters.
    #[must_use]
    pub fn counters(&self, worker: usize) -> [u64; COUNTERS] {
        std::array::from_fn(|i| {
            self.counter(worker, i)
                .map_or(0, |word| word.load(Ordering::Relaxed))
        })
    }

    /// Tells workers to leave.
    pub fn stop(&self) {
        self.header().stop.store(1, Ordering::SeqCst);
        self.wake_workers();
        futex::bump(&self.header().progress);
    }

    /// True once [`Ring::stop`] was called.
    #[must_use]
    pub fn stopped(&self) -> bool {
        self.header().stop.load(Ordering::SeqCst) != 0
    }
}
