//! Slots: begun by the owner, filled by workers, taken by the owner.

use std::ptr::NonNull;
use std::slice;
use std::time::Duration;

use super::Ring;
use crate::error::{Error, Result, argument};
use crate::futex;
use crate::protocol::{Slot, SlotHead, SlotState};
use crate::sync::{AtomicU8, Ordering};

impl Ring {
    /// A slot by number.
    pub fn slot(&self, slot: usize) -> Result<Slot<'_>> {
        if slot >= self.shape.slots as usize {
            return Err(argument(
                "slot",
                slot,
                format!("0 to {}", self.shape.slots - 1),
            ));
        }
        let items = self.shape.items as usize;
        let head = self.map.at(
            self.plan.heads + slot * size_of::<SlotHead>(),
            size_of::<SlotHead>(),
        );
        let marks = self.map.at(self.plan.marks + slot * items, items);
        let (Some(head), Some(marks)) = (head, marks) else {
            return Err(argument("slot", slot, "inside the mapping"));
        };
        // SAFETY: both lie inside the mapping by the plan, are aligned, and consist of atomics.
        unsafe {
            Ok(Slot {
                head: &*head.cast::<SlotHead>().as_ptr(),
                marks: slice::from_raw_parts(marks.cast::<AtomicU8>().as_ptr(), items),
            })
        }
    }

    /// Address and length of a slot's bytes.
    pub fn bytes(&self, slot: usize) -> Result<(NonNull<u8>, usize)> {
        let _ = self.slot(slot)?;
        let size = self.shape.slot_bytes as usize;
        let found = self.map.at(self.plan.data + slot * size, size);
        found
            .map(|p| (p, size))
            .ok_or_else(|| argument("slot", slot, "inside the mapping"))
    }

    /// FREE -> FILLING; takes memory for the first `bytes` of the slot.
    pub fn begin(&self, slot: usize, sequence: u64, items: usize, bytes: usize) -> Result<()> {
        let size = self.shape.slot_bytes as usize;
        if bytes > size {
            return Err(argument("bytes", bytes, format!("up to the slot's {size}")));
        }
        let s = self.slot(slot)?;
        if items > s.marks.len() {
            return Err(argument("items", items, format!("up to {}", s.marks.len())));
        }
        self.take_memory(slot, &s, bytes)?;
        s.head.began.store(futex::now(), Ordering::Relaxed);
        if s.begin(sequence, items) {
            Ok(())
        } else {
            Err(wrong_state(slot, &s, "free", "begin"))
        }
    }

    /// Takes memory for the first `bytes` of a slot, for a writer that learns the size late.
    pub fn reserve(&self, slot: usize, bytes: usize) -> Result<()> {
        let s = self.slot(slot)?;
        let size = self.shape.slot_bytes as usize;
        if bytes > size {
            return Err(argument("bytes", bytes, format!("up to the slot's {size}")));
        }
        self.take_memory(slot, &s, bytes)
    }

    /// Takes memory once: a slot keeps its pages from batch to batch, and asking again costs a walk over all of them.
    fn take_memory(&self, slot: usize, s: &Slot<'_>, bytes: usize) -> Result<()> {
        if bytes as u64 <= s.head.reserved.load(Ordering::Acquire) {
            return Ok(());
        }
        let size = self.shape.slot_bytes as usize;
        self.map.reserve(self.plan.data + slot * size, bytes)?;
        s.head.reserved.fetch_max(bytes as u64, Ordering::AcqRel);
        Ok(())
    }

    /// Bytes of a slot for which memory was taken.
    pub fn reserved(&self, slot: usize) -> Result<u64> {
        Ok(self.slot(slot)?.head.reserved.load(Ordering::Acquire))
    }

    /// State of every slot, as numbers of [`SlotState`].
    #[must_use]
    pub fn states(&self) -> Vec<u8> {
        (0..self.shape.slots as usize)
            .map(|slot| {
                self.slot(slot)
                    .map_or(SlotState::Free as u8, |s| s.state() as u8)
            })
            .collect()
    }

    /// Gives a free slot's memory back to the system.
    pub fn shrink(&self, slot: usize) -> Result<()> {
        let s = self.slot(slot)?;
        if s.state() != SlotState::Free {
            return Err(wrong_state(slot, &s, "free", "shrink"));
        }
        let size = self.shape.slot_bytes as usize;
        s.head.reserved.store(0, Ordering::Release);
        self.map.give_back(self.plan.data + slot * size, size)
    }

    /// Marks an item; wakes the owner when the slot became ready, and workers whose job waited for it.
    pub fn mark(&self, slot: usize, sequence: u64, item: usize, value: u8) -> Result<bool> {
        let s = self.slot(slot)?;
        let ready = s.mark(sequence, item, value);
        if ready {
            self.became_ready(&s);
        } else if s.nearly() {
            futex::bump(&self.header().work);
        }
        Ok(ready)
    }

    /// Finds out whether a slot is complete after a worker has died between its mark and the check.
    pub fn settle(&self, slot: usize) -> Result<bool> {
        let s = self.slot(slot)?;
        let ready = s.state() == SlotState::Filling && s.settle();
        if ready {
            self.became_ready(&s);
        }
        Ok(ready)
    }

    fn became_ready(&self, slot: &Slot<'_>) {
        slot.head.ready.store(futex::now(), Ordering::Relaxed);
        futex::bump(&self.header().progress);
        futex::bump(&self.header().work);
    }

    /// Waits until the slot is READY for this batch and takes it. False when the time is over.
    pub fn take(&self, slot: usize, sequence: u64, timeout: Duration) -> Result<bool> {
        let s = self.slot(slot)?;
        let taken = futex::until(&self.header().progress, timeout, || {
            s.take(sequence).then_some(())
        });
        Ok(taken.is_some())
    }
}

fn wrong_state(slot: usize, s: &Slot<'_>, wanted: &'static str, call: &'static str) -> Error {
    Error::State {
        slot,
        actual: format!("{:?}", s.state()).to_lowercase(),
        wanted,
        call,
    }
}
