//! The board: jobs published by the owner and claimed by workers.

use std::ptr::NonNull;
use std::slice;
use std::time::Duration;

use super::Ring;
use super::layout::{JobHead, NO_SLOT};
use crate::error::{Result, argument};
use crate::futex;
use crate::protocol::job;
use crate::sync::Ordering;

/// A job as its worker sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// Number of the job's entry.
    pub entry: usize,
    /// Serial number.
    pub serial: u64,
    /// What to do.
    pub payload: Vec<u8>,
}

impl Ring {
    /// Publishes a job. `waits_for` names a slot of which all items but the last must be marked first, or is
    /// [`NO_SLOT`].
    /// `None` when the board is full.
    pub fn push(&self, payload: &[u8], waits_for: u32) -> Result<Option<u64>> {
        if payload.len() > self.shape.payload as usize {
            return Err(argument(
                "payload",
                format!("{} bytes", payload.len()),
                format!("up to {}", self.shape.payload),
            ));
        }
        let header = self.header();
        let tail = header.tail.load(Ordering::Acquire);
        if tail - header.head.load(Ordering::Acquire) >= u64::from(self.shape.jobs) {
            return Ok(None);
        }
        let (head, bytes) = self.entry(self.index(tail));
        if head.state.word() != job::EMPTY {
            return Ok(None);
        }
        // SAFETY: the entry is EMPTY, so only the owner touches it; the length was checked.
        unsafe { std::ptr::copy_nonoverlapping(payload.as_ptr(), bytes.as_ptr(), payload.len()) };
        head.length.store(payload.len() as u32, Ordering::Relaxed);
        head.waits_for.store(waits_for, Ordering::Relaxed);
        head.serial.store(tail, Ordering::Relaxed);
        head.claimed_at.store(futex::now(), Ordering::Relaxed);
        head.state.publish();
        header.tail.store(tail + 1, Ordering::Release);
        Ok(Some(tail))
    }

    /// Wakes workers after jobs were pushed.
    pub fn wake_workers(&self) {
        futex::bump(&self.header().work);
    }

    pub(super) fn index(&self, serial: u64) -> usize {
        (serial % u64::from(self.shape.jobs)) as usize
    }

    pub(super) fn entry(&self, entry: usize) -> (&JobHead, NonNull<u8>) {
        let size = self.shape.payload as usize;
        let head = self.map.at(
            self.plan.jobs + entry * size_of::<JobHead>(),
            size_of::<JobHead>(),
        );
        let bytes = self.map.at(self.plan.payloads + entry * size, size);
        // SAFETY: `entry` is below the number of jobs, so both lie inside by the plan; the head consists of atomics.
        unsafe {
            (
                &*head
                    .unwrap_or(NonNull::dangling())
                    .cast::<JobHead>()
                    .as_ptr(),
                bytes.unwrap_or(NonNull::dangling()),
            )
        }
    }

    pub(super) fn payload(&self, entry: usize) -> Vec<u8> {
        let (head, bytes) = self.entry(entry);
        let length = head.length.load(Ordering::Acquire).min(self.shape.payload) as usize;
        // SAFETY: inside the entry; the caller holds the claim or is the owner of an ended job.
        unsafe { slice::from_raw_parts(bytes.as_ptr(), length) }.to_vec()
    }

    /// Where a failed job's error goes: beside its payload, which a worker that dies meanwhile leaves whole.
    fn error_place(&self, entry: usize) -> NonNull<u8> {
        let size = self.shape.payload as usize;
        let place = self.map.at(self.plan.errors + entry * size, size);
        place.unwrap_or(NonNull::dangling())
    }

    pub(super) fn error(&self, entry: usize) -> Vec<u8> {
        let (head, _) = self.entry(entry);
        let length = head.error_length.load(Ordering::Acquire);
        let length = length.min(self.shape.payload) as usize;
        // SAFETY: inside the entry's error area by the plan; the caller is the owner of an ended job.
        unsafe { slice::from_raw_parts(self.error_place(entry).as_ptr(), length) }.to_vec()
    }

    /// Waits for a job, oldest first, and claims it. `None` when the time is over or the ring stops.
    pub fn claim(&self, worker: u32, timeout: Duration) -> Result<Option<Claim>> {
        if worker >= self.shape.workers {
            return Err(argument(
                "worker",
                worker,
                format!("0 to {}", self.shape.workers - 1),
            ));
        }
        let found = futex::until(&self.header().work, timeout, || {
            if self.stopped() {
                Some(None)
            } else {
                self.try_claim(worker).map(Some)
            }
        });
        Ok(found.flatten())
    }

    fn try_claim(&self, worker: u32) -> Option<Claim> {
        let header = self.header();
        let (head, tail) = (
            header.head.load(Ordering::Acquire),
            header.tail.load(Ordering::Acquire),
        );
        for serial in head..tail {
            let entry = self.index(serial);
            let (job, _) = self.entry(entry);
            if job.state.word() != job::QUEUED || !self.may_run(job) {
                continue;
            }
            if job.state.claim(worker) {
                if !self.may_run(job) {
                    // The entry was reused since it was looked at, by a job that has to wait.
                    let _ = job.state.requeue(worker);
                    continue;
                }
                job.claimed_at.store(futex::now(), Ordering::Release);
                let serial = job.serial.load(Ordering::Acquire);
                return Some(Claim {
                    entry,
                    serial,
                    payload: self.payload(entry),
                });
            }
        }
        None
    }

    fn may_run(&self, job: &JobHead) -> bool {
        let slot = job.waits_for.load(Ordering::Acquire);
        slot == NO_SLOT || self.slot(slot as usize).is_ok_and(|s| s.nearly())
    }

    /// Ends a claimed job; a failed one carries an error.
    pub fn finish(&self, worker: u32, entry: usize, error: Option<&[u8]>) -> Result<()> {
        if entry >= self.shape.jobs as usize {
            return Err(argument(
                "entry",
                entry,
                format!("0 to {}", self.shape.jobs - 1),
            ));
        }
        let (head, _) = self.entry(entry);
        if head.state.word() != job::claimed_by(worker) {
            return Err(argument(
                "entry",
                entry,
                format!("a job that worker {worker} has claimed"),
            ));
        }
        if let Some(text) = error {
            let length = text.len().min(self.shape.payload as usize);
            let place = self.error_place(entry);
            // SAFETY: this worker holds the claim; the length fits the error area.
            unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), place.as_ptr(), length) };
            head.error_length.store(length as u32, Ordering::Release);
        }
        let _ = head.state.finish(worker, error.is_some());
        futex::bump(&self.header().progress);
        Ok(())
    }

    /// Payloads of jobs that wait, from serial `from` on: a look ahead that claims nothing. A payload that changes
    /// while it is read is left out.
    #[must_use]
    pub fn peek(&self, from: u64, most: usize) -> Vec<(u64, Vec<u8>)> {
        let header = self.header();
        let head = header.head.load(Ordering::Acquire).max(from);
        (head..header.tail.load(Ordering::Acquire))
            .filter_map(|serial| {
                let (job, _) = self.entry(self.index(serial));
                let waits = || {
                    job.state.word() == job::QUEUED && job.serial.load(Ordering::Acquire) == serial
                };
                if !waits() {
                    return None;
                }
                let payload = self.payload(self.index(serial));
                waits().then_some((serial, payload))
            })
            .take(most)
            .collect()
    }

    /// Sleeps until jobs were published, or the time is over.
    pub fn wait_work(&self, timeout: Duration) {
        let word = &self.header().work;
        futex::wait(word, word.load(Ordering::SeqCst), timeout);
    }
}
