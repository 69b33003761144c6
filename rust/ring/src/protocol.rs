//! The state machines of slots and jobs, without memory mapping or waiting, so that a model checker can run them.
//!
//! A slot goes FREE -> FILLING -> READY -> IN_USE -> FREE. While it is FILLING, several writers store their items and
//! mark them; the marks alone say whether the slot is complete, so a writer that dies between two steps loses nothing
//! but its unmarked items, and doing an item twice does no harm.
//!
//! A job goes EMPTY -> QUEUED -> CLAIMED(worker) -> DONE or FAILED -> EMPTY. A claim is one compare-and-swap that also
//! records the worker, so a job of a dead worker is always found.

use crate::sync::{AtomicU8, AtomicU32, AtomicU64, Ordering, fence};

/// States of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum SlotState {
    /// Nobody uses it.
    Free = 0,
    /// Writers may store items.
    Filling = 1,
    /// All items are marked.
    Ready = 2,
    /// The reader has it.
    InUse = 3,
}

impl SlotState {
    /// From its number; anything unknown counts as free.
    #[must_use]
    pub fn from_word(word: u32) -> Self {
        match word {
            1 => Self::Filling,
            2 => Self::Ready,
            3 => Self::InUse,
            _ => Self::Free,
        }
    }
}

/// Mark of an item that is not there yet.
pub const PENDING: u8 = 0;
/// Mark of an item that was stored.
pub const STORED: u8 = 1;
/// Mark of an item that could not be made.
pub const FAILED_ITEM: u8 = 2;

/// Shared words of a slot.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct SlotHead {
    /// A [`SlotState`].
    pub state: AtomicU32,
    /// Number of items that make the slot complete.
    pub items: AtomicU32,
    /// Batch the slot is for; unique over the life of the ring.
    pub sequence: AtomicU64,
    /// Nanoseconds (monotonic clock) when filling began.
    pub began: AtomicU64,
    /// Nanoseconds when it became ready.
    pub ready: AtomicU64,
    /// Bytes from the start of the slot for which memory was taken.
    pub reserved: AtomicU64,
}

/// A slot and the marks of its items.
#[derive(Debug, Clone, Copy)]
pub struct Slot<'a> {
    /// Shared words.
    pub head: &'a SlotHead,
    /// One mark per item.
    pub marks: &'a [AtomicU8],
}

impl Slot<'_> {
    /// State now.
    #[must_use]
    pub fn state(&self) -> SlotState {
        SlotState::from_word(self.head.state.load(Ordering::Acquire))
    }

    /// Batch the slot is for.
    #[must_use]
    pub fn sequence(&self) -> u64 {
        self.head.sequence.load(Ordering::Acquire)
    }

    /// FREE -> FILLING for a batch of `items`. Only the owner of the ring calls it. False when it is not free.
    #[must_use]
    pub fn begin(&self, sequence: u64, items: usize) -> bool {
        if items > self.marks.len() || self.state() != SlotState::Free {
            return false;
        }
        for mark in &self.marks[..items] {
            mark.store(PENDING, Ordering::Relaxed);
        }
        self.head.items.store(items as u32, Ordering::Relaxed);
        self.head.sequence.store(sequence, Ordering::Relaxed);
        self.head
            .state
            .store(SlotState::Filling as u32, Ordering::Release);
        true
    }

    /// True when a writer may still store this item of this batch.
    #[must_use]
    pub fn wants(&self, sequence: u64, item: usize) -> bool {
        self.state() == SlotState::Filling
            && self.sequence() == sequence
            && self
                .marks
                .get(item)
                .is_some_and(|mark| mark.load(Ordering::Acquire) == PENDING)
    }

    /// Marks an item and moves the slot to READY when it was the last one. True when this call made it ready.
    #[must_use]
    pub fn mark(&self, sequence: u64, item: usize, value: u8) -> bool {
        if self.state() != SlotState::Filling || self.sequence() != sequence {
            return false;
        }
        let Some(mark) = self.marks.get(item) else {
            return false;
        };
        mark.store(value, Ordering::Release);
        self.settle()
    }

    /// Moves a slot whose items are all marked to READY. True when this call did it.
    ///
    /// Every marker calls it after its own mark; the owner calls it again after a worker has died.
    #[must_use]
    pub fn settle(&self) -> bool {
        // Two writers that mark the last two items at once must not both miss the other's mark.
        fence(Ordering::SeqCst);
        let items = self.head.items.load(Ordering::Acquire) as usize;
        let complete = self.marks[..items.min(self.marks.len())]
            .iter()
            .all(|m| m.load(Ordering::Acquire) != PENDING);
        complete && self.shift(SlotState::Filling, SlotState::Ready)
    }

    /// True when only the last item is missing (or nothing): the one that is made from all others.
    #[must_use]
    pub fn nearly(&self) -> bool {
        fence(Ordering::SeqCst);
        match self.state() {
            SlotState::Free => false,
            SlotState::Ready | SlotState::InUse => true,
            SlotState::Filling => {
                let items = self.head.items.load(Ordering::Acquire) as usize;
                let others = items.saturating_sub(1).min(self.marks.len());
                self.marks[..others]
                    .iter()
                    .all(|m| m.load(Ordering::Acquire) != PENDING)
            }
        }
    }

    /// READY -> IN_USE.
    #[must_use]
    pub fn take(&self, sequence: u64) -> bool {
        self.sequence() == sequence && self.shift(SlotState::Ready, SlotState::InUse)
    }

    /// IN_USE -> FREE.
    #[must_use]
    pub fn release(&self) -> bool {
        self.shift(SlotState::InUse, SlotState::Free)
    }

    /// FILLING or READY -> FREE, for a batch that nobody wants any more. The owner calls it when no writer is left.
    pub fn abandon(&self) {
        if !self.shift(SlotState::Filling, SlotState::Free) {
            let _ = self.shift(SlotState::Ready, SlotState::Free);
        }
    }

    fn shift(&self, from: SlotState, to: SlotState) -> bool {
        self.head
            .state
            .compare_exchange(from as u32, to as u32, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
    }
}

/// Kinds of a job's state word; a claimed word also holds the worker.
pub mod job {
    /// No job here.
    pub const EMPTY: u32 = 0;
    /// Waiting for a worker.
    pub const QUEUED: u32 = 1;
    /// A worker is at it; the worker's number is in the upper bits.
    pub const CLAIMED: u32 = 2;
    /// Finished.
    pub const DONE: u32 = 3;
    /// Finished with an error, which lies beside the payload.
    pub const FAILED: u32 = 4;

    /// State word of a job claimed by `worker`.
    #[must_use]
    pub fn claimed_by(worker: u32) -> u32 {
        CLAIMED | (worker << 8)
    }

    /// Kind and worker of a state word.
    #[must_use]
    pub fn split(word: u32) -> (u32, u32) {
        (word & 0xff, word >> 8)
    }
}

/// The state word of a job.
#[derive(Debug)]
#[repr(transparent)]
pub struct JobState(pub AtomicU32);

impl JobState {
    /// Word now.
    #[must_use]
    pub fn word(&self) -> u32 {
        self.0.load(Ordering::Acquire)
    }

    /// EMPTY -> QUEUED, after the payload was written.
    pub fn publish(&self) {
        self.0.store(job::QUEUED, Ordering::Release);
    }

    /// QUEUED -> CLAIMED(worker).
    #[must_use]
    pub fn claim(&self, worker: u32) -> bool {
        self.swap(job::QUEUED, job::claimed_by(worker))
    }

    /// CLAIMED(worker) -> DONE or FAILED.
    #[must_use]
    pub fn finish(&self, worker: u32, failed: bool) -> bool {
        self.swap(
            job::claimed_by(worker),
            if failed { job::FAILED } else { job::DONE },
        )
    }

    /// CLAIMED(worker) -> QUEUED, once that worker is known to be dead.
    #[must_use]
    pub fn requeue(&self, worker: u32) -> bool {
        self.swap(job::claimed_by(worker), job::QUEUED)
    }

    /// QUEUED, DONE or FAILED -> EMPTY. False when a worker is at it.
    #[must_use]
    pub fn clear(&self) -> bool {
        [job::QUEUED, job::DONE, job::FAILED]
            .into_iter()
            .any(|from| self.swap(from, job::EMPTY))
    }

    fn swap(&self, from: u32, to: u32) -> bool {
        self.0
            .compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn head() -> SlotHead {
        SlotHead {
            state: AtomicU32::new(0),
            items: AtomicU32::new(0),
            sequence: AtomicU64::new(0),
            began: AtomicU64::new(0),
            ready: AtomicU64::new(0),
            reserved: AtomicU64::new(0),
        }
    }

    proptest! {
        /// Whatever the order of marks, repeats and stale marks, a slot is ready once all its items are marked and
        /// never before, and it is handed out once per batch.
        #[test]
        fn ready_exactly_when_all_items_are_marked(
            items in 1_usize..20,
            marks in prop::collection::vec((0_usize..24, 1_u64..4), 0..120),
        ) {
            let (head, flags) = (head(), (0..20).map(|_| AtomicU8::new(9)).collect::<Vec<_>>());
            let slot = Slot { head: &head, marks: &flags };
            prop_assert!(slot.begin(2, items));
            prop_assert!(!slot.begin(3, items));
            let mut seen = std::collections::HashSet::new();
            for (item, sequence) in marks {
                let made_ready = slot.mark(sequence, item, STORED);
                if sequence == 2 && item < items && slot.state() != SlotState::InUse {
                    seen.insert(item);
                }
                prop_assert_eq!(slot.state() == SlotState::Ready, seen.len() == items);
                prop_assert!(!made_ready || seen.len() == items);
            }
            prop_assert_eq!(slot.take(2), seen.len() == items);
            prop_assert!(!slot.take(2));
            prop_assert_eq!(slot.release(), seen.len() == items);
            slot.abandon();
            prop_assert_eq!(slot.state(), SlotState::Free);
        }
    }

    #[test]
    fn a_job_is_claimed_once_and_only_its_worker_finishes_it() {
        let state = JobState(AtomicU32::new(job::EMPTY));
        assert!(!state.claim(1));
        state.publish();
        assert!(state.claim(7));
        assert!(!state.claim(8));
        assert!(!state.finish(8, false));
        assert!(!state.clear());
        assert!(state.requeue(7));
        assert!(state.claim(8));
        assert!(state.finish(8, true));
        assert_eq!(job::split(state.word()), (job::FAILED, 0));
        assert!(state.clear());
    }
}
