//! What the heap needs from a device, and a device with logical time for tests.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::error::{PoolError, Result};

/// Identifies a stream; zero is the default stream.
pub type StreamId = u64;
/// Identifies an event.
pub type EventId = u64;

/// Calls the heap makes off the hot path. Nothing here may call back into the heap.
pub trait Device: Send {
    /// Reserve `bytes` of address space in one piece and return its base. With [`Device::commits`] the memory behind
    /// it comes later, otherwise at once.
    fn reserve(&mut self, bytes: u64) -> Result<u64>;
    /// Give a whole reservation back. No work may be using it.
    fn release(&mut self, base: u64, bytes: u64);
    /// Whether memory must be committed before use (virtual memory backing).
    fn commits(&self) -> bool {
        false
    }
    /// Granularity of [`Device::commit`] in bytes.
    fn commit_bytes(&self) -> u64 {
        crate::SPAN
    }
    /// Put memory behind `[address, address + bytes)`, a multiple of the granularity.
    fn commit(&mut self, _address: u64, _bytes: u64) -> Result<()> {
        Ok(())
    }
    /// Take the memory behind `[address, address + bytes)` away again.
    fn decommit(&mut self, _address: u64, _bytes: u64) {}
    /// Mark the present end of `stream`.
    fn record(&mut self, stream: StreamId) -> Result<EventId>;
    /// Whether the work before `event` is done.
    fn done(&mut self, event: EventId) -> Result<bool>;
    /// Make later work on `stream` wait for `event`, without blocking the host.
    fn wait(&mut self, stream: StreamId, event: EventId) -> Result<()>;
    /// Forget an event.
    fn forget(&mut self, event: EventId);
    /// Identifier of the capture that `stream` is part of, if any.
    fn capture(&mut self, stream: StreamId) -> Option<u64>;
    /// Block the host until all work is done.
    fn synchronize(&mut self) -> Result<()>;
    /// Bytes the device could still give, if known.
    fn available(&mut self) -> Option<u64> {
        None
    }
}

/// Logical time of every stream, as seen from one point.
pub type Clock = HashMap<StreamId, u64>;

/// A device without memory: addresses are numbers, streams are counters, and work completes when the test says so.
///
/// Every stream has a vector clock. Work on stream `s` advances `s`; an event copies the clock; waiting joins it. A
/// use at time `k` of stream `s` is ordered before the next work of stream `t` exactly when `clock(t)[s] >= k` or the
/// work is already complete.
#[derive(Debug, Default)]
pub struct FakeDevice {
    budget: u64,
    used: u64,
    next_base: u64,
    /// Reservations: base -> bytes.
    pub reservations: HashMap<u64, u64>,
    clocks: HashMap<StreamId, Clock>,
    complete: Clock,
    events: HashMap<EventId, Clock>,
    next_event: u64,
    captures: HashMap<StreamId, u64>,
    /// Calls made, by name.
    pub calls: HashMap<&'static str, u64>,
    contiguous: bool,
    commits: bool,
    /// First addresses of committed pieces.
    pub committed: HashSet<u64>,
}

impl FakeDevice {
    /// A device of `budget` bytes. With `contiguous`, successive reservations are adjacent.
    pub fn new(budget: u64, contiguous: bool) -> Self {
        Self {
            budget,
            next_base: 1 << 32,
            contiguous,
            ..Self::default()
        }
    }

    /// As [`FakeDevice::new`], but memory is committed in pieces of 32 MiB as virtual memory is; addresses are free.
    pub fn committing(budget: u64) -> Self {
        Self {
            commits: true,
            ..Self::new(budget, false)
        }
    }

    fn count(&mut self, call: &'static str) {
        *self.calls.entry(call).or_default() += 1;
    }

    /// Enqueue one piece of work on `stream`; returns its time.
    pub fn work(&mut self, stream: StreamId) -> u64 {
        let clock = self.clocks.entry(stream).or_default();
        let time = clock.entry(stream).or_default();
        *time += 1;
        *time
    }

    /// Complete the work of `stream` up to `time` and all that was ordered before it.
    pub fn complete(&mut self, stream: StreamId, time: u64) {
        let done = self.complete.entry(stream).or_default();
        *done = (*done).max(time);
    }

    /// Whether work `time` of `stream` is ordered before the next work of `next`.
    pub fn ordered(&self, stream: StreamId, time: u64, next: StreamId) -> bool {
        self.complete.get(&stream).is_some_and(|&t| t >= time)
            || self
                .clocks
                .get(&next)
                .and_then(|c| c.get(&stream))
                .is_some_and(|&t| t >= time)
    }

    /// Start or end a capture on `stream`.
    pub fn set_capture(&mut self, stream: StreamId, capture: Option<u64>) {
        match capture {
            Some(id) => self.captures.insert(stream, id),
            None => self.captures.remove(&stream),
        };
    }

    /// First address that was ever reserved.
    pub fn base(&self) -> u64 {
        1 << 32
    }

    /// Bytes reserved now.
    pub fn used(&self) -> u64 {
        self.used
    }

    fn capturing(&self) -> bool {
        !self.captures.is_empty()
    }
}

impl Device for FakeDevice {
    fn reserve(&mut self, bytes: u64) -> Result<u64> {
        self.count("reserve");
        if self.commits {
            let base = self.next_base;
            self.next_base += bytes;
            return Ok(base);
        }
        if self.used + bytes > self.budget {
            return Err(PoolError::Device {
                call: "reserve",
                code: 2,
            });
        }
        self.used += bytes;
        let base = self.next_base;
        self.next_base += bytes + if self.contiguous { 0 } else { crate::SPAN };
        self.reservations.insert(base, bytes);
        Ok(base)
    }

    fn release(&mut self, base: u64, bytes: u64) {
        self.count("release");
        if self.reservations.remove(&base).is_some() {
            self.used -= bytes;
        }
    }

    fn commits(&self) -> bool {
        self.commits
    }

    fn commit_bytes(&self) -> u64 {
        if self.commits { 32 << 20 } else { crate::SPAN }
    }

    fn commit(&mut self, address: u64, bytes: u64) -> Result<()> {
        self.count("commit");
        if self.used + bytes > self.budget || !self.committed.insert(address) {
            return Err(PoolError::Device {
                call: "commit",
                code: 2,
            });
        }
        self.used += bytes;
        Ok(())
    }

    fn decommit(&mut self, address: u64, bytes: u64) {
        self.count("decommit");
        if self.committed.remove(&address) {
            self.used -= bytes;
        }
    }

    fn record(&mut self, stream: StreamId) -> Result<EventId> {
        self.count("record");
        if self.capturing() {
            return Err(PoolError::Device {
                call: "record",
                code: 900,
            });
        }
        self.next_event += 1;
        let clock = self.clocks.entry(stream).or_default().clone();
        self.events.insert(self.next_event, clock);
        Ok(self.next_event)
    }

    fn done(&mut self, event: EventId) -> Result<bool> {
        self.count("done");
        if self.capturing() {
            return Err(PoolError::Device {
                call: "done",
                code: 900,
            });
        }
        let clock = self.events.get(&event).ok_or(PoolError::Device {
            call: "done",
            code: 400,
        })?;
        Ok(clock
            .iter()
            .all(|(s, &t)| self.complete.get(s).copied().unwrap_or(0) >= t))
    }

    fn wait(&mut self, stream: StreamId, event: EventId) -> Result<()> {
        self.count("wait");
        let other = self
            .events
            .get(&event)
            .ok_or(PoolError::Device {
                call: "wait",
                code: 400,
            })?
            .clone();
        let clock = self.clocks.entry(stream).or_default();
        for (s, t) in other {
            let mine = clock.entry(s).or_default();
            *mine = (*mine).max(t);
        }
        Ok(())
    }

    fn forget(&mut self, event: EventId) {
        self.events.remove(&event);
    }

    fn capture(&mut self, stream: StreamId) -> Option<u64> {
        self.captures.get(&stream).copied()
    }

    fn synchronize(&mut self) -> Result<()> {
        self.count("synchronize");
        if self.capturing() {
            return Err(PoolError::Device {
                call: "synchronize",
                code: 900,
            });
        }
        for (stream, clock) in &self.clocks {
            let time = clock.get(stream).copied().unwrap_or(0);
            let done = self.complete.entry(*stream).or_default();
            *done = (*done).max(time);
        }
        Ok(())
    }

    fn available(&mut self) -> Option<u64> {
        Some(self.budget - self.used)
    }
}

/// A device that a test can reach while a heap owns it.
#[derive(Clone, Default)]
pub struct SharedDevice(Arc<Mutex<FakeDevice>>);

impl SharedDevice {
    /// Share `device`.
    pub fn new(device: FakeDevice) -> Self {
        Self(Arc::new(Mutex::new(device)))
    }

    /// The device itself.
    pub fn get(&self) -> MutexGuard<'_, FakeDevice> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Device for SharedDevice {
    fn reserve(&mut self, bytes: u64) -> Result<u64> {
        self.get().reserve(bytes)
    }

    fn release(&mut self, base: u64, bytes: u64) {
        self.get().release(base, bytes);
    }

    fn commits(&self) -> bool {
        self.get().commits()
    }

    fn commit_bytes(&self) -> u64 {
        self.get().commit_bytes()
    }

    fn commit(&mut self, address: u64, bytes: u64) -> Result<()> {
        self.get().commit(address, bytes)
    }

    fn decommit(&mut self, address: u64, bytes: u64) {
        self.get().decommit(address, bytes);
    }

    fn record(&mut self, stream: StreamId) -> Result<EventId> {
        self.get().record(stream)
    }

    fn done(&mut self, event: EventId) -> Result<bool> {
        self.get().done(event)
    }

    fn wait(&mut self, stream: StreamId, event: EventId) -> Result<()> {
        self.get().wait(stream, event)
    }

    fn forget(&mut self, event: EventId) {
        self.get().forget(event);
    }

    fn capture(&mut self, stream: StreamId) -> Option<u64> {
        self.get().capture(stream)
    }

    fn synchronize(&mut self) -> Result<()> {
        self.get().synchronize()
    }

    fn available(&mut self) -> Option<u64> {
        self.get().available()
    }
}
