//! The owner's view of the board: what has ended, who holds what, and taking work back from the dead.

use std::time::Duration;

use super::Ring;
use crate::futex;
use crate::protocol::job;
use crate::sync::Ordering;

/// A job that has ended, or is in some worker's hands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobReport {
    /// Serial number.
    pub serial: u64,
    /// Kind of its state, see [`job`].
    pub kind: u32,
    /// Worker that has it, for claimed jobs.
    pub worker: u32,
    /// Nanoseconds since it was claimed.
    pub age: u64,
    /// What went wrong, for failed jobs.
    pub error: Vec<u8>,
}

impl Ring {
    /// Owner: removes ended jobs and reports the failed ones; moves the head of the board on.
    #[must_use]
    pub fn collect(&self) -> Vec<JobReport> {
        let header = self.header();
        let (mut head, tail) = (
            header.head.load(Ordering::Acquire),
            header.tail.load(Ordering::Acquire),
        );
        let mut failed = Vec::new();
        for serial in head..tail {
            let entry = self.index(serial);
            let (job, _) = self.entry(entry);
            if job.serial.load(Ordering::Acquire) != serial {
                continue;
            }
            let (kind, _) = job::split(job.state.word());
            if kind == job::FAILED {
                failed.push(JobReport {
                    serial,
                    kind,
                    worker: 0,
                    age: 0,
                    error: self.error(entry),
                });
            }
            if matches!(kind, job::DONE | job::FAILED) {
                let _ = job.state.clear();
            }
        }
        while head < tail && self.entry(self.index(head)).0.state.word() == job::EMPTY {
            head += 1;
        }
        header.head.store(head, Ordering::Release);
        failed
    }

    /// Owner: jobs in workers' hands.
    #[must_use]
    pub fn claimed(&self) -> Vec<JobReport> {
        let header = self.header();
        let now = futex::now();
        (header.head.load(Ordering::Acquire)..header.tail.load(Ordering::Acquire))
            .filter_map(|serial| {
                let (head, _) = self.entry(self.index(serial));
                let (kind, worker) = job::split(head.state.word());
                let age = now.saturating_sub(head.claimed_at.load(Ordering::Acquire));
                (kind == job::CLAIMED).then_some(JobReport {
                    serial,
                    kind,
                    worker,
                    age,
                    error: Vec::new(),
                })
            })
            .collect()
    }

    /// Owner: what a job that is not finished asks for.
    #[must_use]
    pub fn job(&self, serial: u64) -> Option<Vec<u8>> {
        let header = self.header();
        let under_way = header.head.load(Ordering::Acquire)..header.tail.load(Ordering::Acquire);
        let (head, _) = self.entry(self.index(serial));
        let kept = under_way.contains(&serial)
            && head.serial.load(Ordering::Acquire) == serial
            && matches!(job::split(head.state.word()).0, job::QUEUED | job::CLAIMED);
        kept.then(|| self.payload(self.index(serial)))
    }

    /// Owner: puts the jobs of a dead worker back on the board. The worker must not run any more.
    #[must_use]
    pub fn requeue(&self, worker: u32) -> usize {
        let mine: Vec<_> = self
            .claimed()
            .into_iter()
            .filter(|report| report.worker == worker)
            .collect();
        let count = mine
            .iter()
            .filter(|r| self.entry(self.index(r.serial)).0.state.requeue(worker))
            .count();
        self.wake_workers();
        count
    }

    /// Owner: takes jobs that nobody has claimed off the board. Returns how many workers still hold.
    #[must_use]
    pub fn clear_queued(&self) -> usize {
        let header = self.header();
        for serial in header.head.load(Ordering::Acquire)..header.tail.load(Ordering::Acquire) {
            let _ = self.entry(self.index(serial)).0.state.clear();
        }
        let _ = self.collect();
        self.claimed().len()
    }

    /// Jobs that are not finished.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        let header = self.header();
        (header.head.load(Ordering::Acquire)..header.tail.load(Ordering::Acquire))
            .filter(|serial| {
                let (kind, _) = job::split(self.entry(self.index(*serial)).0.state.word());
                matches!(kind, job::QUEUED | job::CLAIMED)
            })
            .count()
    }

    /// Waits until something was finished since `seen`, or the time is over; returns the new progress number.
    #[must_use]
    pub fn wait_progress(&self, seen: u32, timeout: Duration) -> u32 {
        let word = &self.header().progress;
        if word.load(Ordering::SeqCst) == seen {
            futex::wait(word, seen, timeout);
        }
        word.load(Ordering::SeqCst)
    }
}
