//! Blocks that other streams use, and memory that changes its owner.

use std::collections::VecDeque;

use super::{Block, Heap, Owner, Pending};
use crate::device::{EventId, StreamId};
use crate::error::{PoolError, Result};

impl Heap {
    /// Note that `stream` uses the block at `address`. The block's own stream is ignored.
    pub fn record_stream(&mut self, address: u64, stream: StreamId) -> Result<()> {
        let block = self
            .live
            .get_mut(&address)
            .ok_or(PoolError::UnknownBlock { address })?;
        if block.stream == stream {
            return Ok(());
        }
        block.recorded = true;
        let streams = self.recorded.entry(address).or_default();
        if !streams.contains(&stream) {
            streams.push(stream);
        }
        Ok(())
    }

    /// Free `block` once `streams` are done with it.
    pub(super) fn free_after(&mut self, block: Block, streams: Vec<StreamId>) {
        if matches!(self.arenas[block.owner as usize].owner, Owner::Graph(_)) {
            // Graph memory is reused inside its graph only; replays are ordered by whoever launches them.
            self.give(block);
            return;
        }
        self.counters.deferred_frees += 1;
        if self.capture_underway() {
            self.deferred.push((block, streams));
        } else {
            self.mark(block, &streams);
        }
    }

    fn mark(&mut self, block: Block, streams: &[StreamId]) {
        let mut events = Vec::with_capacity(streams.len());
        for &stream in streams {
            if let Ok(event) = self.device.record(stream) {
                events.push(event);
            } else {
                // The stream refuses events (it is gone or captures): keep the block for a later, whole wait.
                self.deferred.push((block, streams.to_vec()));
                for event in events {
                    self.device.forget(event);
                }
                return;
            }
        }
        let lane = streams.first().copied().unwrap_or(block.stream);
        self.waiting += 1;
        match self.pending.iter_mut().find(|(s, _)| *s == lane) {
            Some((_, queue)) => queue.push_back(Pending { block, events }),
            None => self
                .pending
                .push((lane, VecDeque::from([Pending { block, events }]))),
        }
    }

    /// Give back the blocks whose other streams are done. Only the head of each lane is asked.
    pub(super) fn poll(&mut self) {
        if self.capture_underway() {
            return;
        }
        for (block, streams) in std::mem::take(&mut self.deferred) {
            self.mark(block, &streams);
        }
        for lane in 0..self.pending.len() {
            while let Some(head) = self.pending[lane].1.front() {
                let done = head
                    .events
                    .iter()
                    .all(|&e| self.device.done(e).unwrap_or(false));
                if !done {
                    break;
                }
                self.release_head(lane);
            }
        }
    }

    fn release_head(&mut self, lane: usize) {
        if let Some(Pending { block, events }) = self.pending[lane].1.pop_front() {
            self.forget_all(&events);
            self.waiting -= 1;
            self.give(block);
        }
    }

    fn forget_all(&mut self, events: &[EventId]) {
        for &event in events {
            self.device.forget(event);
        }
    }

    /// Return every waiting block now: its owner's stream waits for the events on the device, the host does not.
    pub(super) fn settle(&mut self) -> bool {
        if self.capture_underway() || (self.waiting == 0 && self.deferred.is_empty()) {
            return false;
        }
        for (block, streams) in std::mem::take(&mut self.deferred) {
            self.mark(block, &streams);
        }
        let mut moved = false;
        for lane in 0..self.pending.len() {
            while let Some(head) = self.pending[lane].1.front() {
                let stream = self.stream_of(head.block.owner);
                let events = head.events.clone();
                if !events.iter().all(|&e| self.device.wait(stream, e).is_ok()) {
                    break;
                }
                self.release_head(lane);
                moved = true;
            }
        }
        moved
    }

    pub(super) fn stream_of(&self, owner: u32) -> StreamId {
        match self.arenas[owner as usize].owner {
            Owner::Stream(stream) => stream,
            Owner::Graph(_) => 0,
        }
    }

    /// Order all past uses of `from`'s free memory before the next work of `to`. A graph pool needs no event: its work
    /// runs at replay, and the end of the capture waits for the device.
    pub(super) fn order_after(&mut self, from: u32, to: u32) -> bool {
        if matches!(self.arenas[to as usize].owner, Owner::Graph(_)) {
            return true;
        }
        let (from, to) = (self.stream_of(from), self.stream_of(to));
        if self.capture_underway()
            && (self.device.capture(from).is_some() || self.device.capture(to).is_some())
        {
            return false;
        }
        let Ok(event) = self.device.record(from) else {
            return false;
        };
        let ordered = self.device.wait(to, event).is_ok();
        self.device.forget(event);
        ordered
    }

    /// Blocks freed by the program but not yet reusable.
    pub fn waiting(&self) -> usize {
        self.waiting + self.deferred.len()
    }
}
