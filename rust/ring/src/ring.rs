//! Slots and jobs in shared memory, with waiting.
//!
//! One process owns the ring: it begins slots, publishes jobs and reads batches. Worker processes claim jobs, store
//! items and mark them. Nothing in here is a lock, so no process can leave one behind.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::slice;
use std::time::Duration;

use crate::error::{Error, Result, argument};
use crate::futex;
use crate::protocol::{JobState, Slot, SlotHead, SlotState, job};
use crate::shm::Mapping;
use crate::sync::{AtomicU8, AtomicU32, AtomicU64, Ordering};

const MAGIC: u64 = 0x4c46_5249_4e47_0001;
const PAGE: usize = 4096;
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
struct Header {
    magic: u64,
    shape: Shape,
    /// Bumped when there is work to claim.
    work: AtomicU32,
    /// Bumped when a slot is ready or a job has failed.
    progress: AtomicU32,
    /// Set when workers shall leave.
    stop: AtomicU32,
    /// First job that may be unfinished, and one past the last; serial numbers.
    head: AtomicU64,
    tail: AtomicU64,
}

#[repr(C, align(64))]
struct JobHead {
    state: JobState,
    length: AtomicU32,
    waits_for: AtomicU32,
    _pad: u32,
    claimed_at: AtomicU64,
    serial: AtomicU64,
}

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
    /// Payload, for failed jobs: the error.
    pub payload: Vec<u8>,
}

struct Plan {
    heads: usize,
    marks: usize,
    jobs: usize,
    payloads: usize,
    counters: usize,
    data: usize,
    total: usize,
}

fn plan(shape: Shape) -> Option<Plan> {
    let up = |value: usize| value.checked_next_multiple_of(PAGE);
    let (slots, jobs) = (shape.slots as usize, shape.jobs as usize);
    let heads = PAGE;
    let marks = up(heads.checked_add(slots.checked_mul(size_of::<SlotHead>())?)?)?;
    let job_heads = up(marks.checked_add(slots.checked_mul(shape.items as usize)?)?)?;
    let payloads = up(job_heads.checked_add(jobs.checked_mul(size_of::<JobHead>())?)?)?;
    let counters = up(payloads.checked_add(jobs.checked_mul(shape.payload as usize)?)?)?;
    let data = up(counters.checked_add((shape.workers as usize).checked_mul(COUNTERS * 8)?)?)?;
    let total = data.checked_add(slots.checked_mul(shape.slot_bytes as usize)?)?;
    Some(Plan {
        heads,
        marks,
        jobs: job_heads,
        payloads,
        counters,
        data,
        total,
    })
}

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
        if bytes > 0 {
            self.map.reserve(self.plan.data + slot * size, bytes)?;
        }
        s.head.began.store(futex::now(), Ordering::Relaxed);
        if s.begin(sequence, items) {
            Ok(())
        } else {
            Err(wrong_state(slot, &s, "free", "begin"))
        }
    }

    /// Takes memory for the first `bytes` of a slot, for a writer that learns the size late.
    pub fn reserve(&self, slot: usize, bytes: usize) -> Result<()> {
        let _ = self.slot(slot)?;
        let size = self.shape.slot_bytes as usize;
        if bytes > size {
            return Err(argument("bytes", bytes, format!("up to the slot's {size}")));
        }
        if bytes == 0 {
            Ok(())
        } else {
            self.map.reserve(self.plan.data + slot * size, bytes)
        }
    }

    /// Gives a free slot's memory back to the system.
    pub fn shrink(&self, slot: usize) -> Result<()> {
        let s = self.slot(slot)?;
        if s.state() != SlotState::Free {
            return Err(wrong_state(slot, &s, "free", "shrink"));
        }
        let size = self.shape.slot_bytes as usize;
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

    fn index(&self, serial: u64) -> usize {
        (serial % u64::from(self.shape.jobs)) as usize
    }

    fn entry(&self, entry: usize) -> (&JobHead, NonNull<u8>) {
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

    fn payload(&self, entry: usize) -> Vec<u8> {
        let (head, bytes) = self.entry(entry);
        let length = head.length.load(Ordering::Acquire).min(self.shape.payload) as usize;
        // SAFETY: inside the entry; the caller holds the claim or is the owner of an ended job.
        unsafe { slice::from_raw_parts(bytes.as_ptr(), length) }.to_vec()
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

    /// Ends a claimed job; a failed one carries an error in place of its payload.
    pub fn finish(&self, worker: u32, entry: usize, error: Option<&[u8]>) -> Result<()> {
        if entry >= self.shape.jobs as usize {
            return Err(argument(
                "entry",
                entry,
                format!("0 to {}", self.shape.jobs - 1),
            ));
        }
        let (head, bytes) = self.entry(entry);
        if head.state.word() != job::claimed_by(worker) {
            return Err(argument(
                "entry",
                entry,
                format!("a job that worker {worker} has claimed"),
            ));
        }
        if let Some(text) = error {
            let length = text.len().min(self.shape.payload as usize);
            // SAFETY: this worker holds the claim; the length fits the entry.
            unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), bytes.as_ptr(), length) };
            head.length.store(length as u32, Ordering::Release);
        }
        let _ = head.state.finish(worker, error.is_some());
        futex::bump(&self.header().progress);
        Ok(())
    }

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
                    payload: self.payload(entry),
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
                    payload: Vec::new(),
                })
            })
            .collect()
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

    /// Sleeps until jobs were published, or the time is over.
    pub fn wait_work(&self, timeout: Duration) {
        let word = &self.header().work;
        futex::wait(word, word.load(Ordering::SeqCst), timeout);
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
}

fn wrong_state(slot: usize, s: &Slot<'_>, wanted: &'static str, call: &'static str) -> Error {
    Error::State {
        slot,
        actual: format!("{:?}", s.state()).to_lowercase(),
        wanted,
        call,
    }
}
