//! Memory of captured graphs: an arena per pool, held until the pool is released.

use super::{Heap, Owner};
use crate::device::StreamId;
use crate::error::{PoolError, Result};

/// Identifier of a graph memory pool (a pair of integers, as torch has it).
pub type PoolId = (u64, u64);

#[derive(Debug, Clone, Copy)]
pub(super) struct GraphPool {
    pub id: PoolId,
    pub owner: u32,
    pub uses: u32,
    /// Failed captures that were taken off `uses` and whose release may still come.
    pub abandoned: u32,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct ActiveCapture {
    pub id: PoolId,
    pub owner: u32,
    /// Capture and stream, known from the first allocation made while capturing.
    pub seen: Option<(u64, StreamId)>,
}

/// Captures that are remembered although nothing was seen of them.
const SUSPECTS: usize = 4;

impl Heap {
    /// A capture into pool `id` is about to begin. Work already on the device is waited for, so that the graph may use
    /// memory that eager work has left.
    pub fn begin_capture(&mut self, id: PoolId) -> Result<()> {
        if self.arenas.is_empty() {
            self.start(0)?;
        }
        self.purge_captures();
        if self.active.is_empty() {
            self.settle();
            self.wait_for_device();
        }
        let owner = if let Some(pool) = self.graphs.iter_mut().find(|p| p.id == id) {
            pool.uses += 1;
            pool.owner
        } else {
            let owner = self.reuse_or_add(id);
            self.graphs.push(GraphPool {
                id,
                owner,
                uses: 1,
                abandoned: 0,
            });
            owner
        };
        self.active.push(ActiveCapture {
            id,
            owner,
            seen: None,
        });
        Ok(())
    }

    /// The capture into pool `id` has ended.
    pub fn end_capture(&mut self, id: PoolId) -> Result<()> {
        let position = self
            .active
            .iter()
            .rposition(|a| a.id == id)
            .ok_or_else(|| PoolError::BadStep {
                what: format!("no capture into pool {id:?} is under way"),
            })?;
        self.active.remove(position);
        if self.active.is_empty() {
            // Eager work that used memory before the graph took it must be over before the first replay.
            self.wait_for_device();
            self.poll();
        }
        Ok(())
    }

    /// Pool `id` is no longer used by a graph; its free memory goes back when the last user is gone.
    pub fn release_pool(&mut self, id: PoolId) -> Result<()> {
        self.active.retain(|a| a.id != id);
        self.suspects.retain(|a| a.id != id);
        let position =
            self.graphs
                .iter()
                .position(|p| p.id == id)
                .ok_or_else(|| PoolError::BadStep {
                    what: format!("graph pool {id:?} is unknown or was released before"),
                })?;
        let pool = &mut self.graphs[position];
        if pool.abandoned > 0 {
            pool.abandoned -= 1;
        } else {
            pool.uses -= 1;
        }
        if pool.uses == 0 {
            let pool = self.graphs.remove(position);
            self.return_graph_memory(pool.owner);
        }
        Ok(())
    }

    /// Graph pools that are held.
    pub fn graph_pools(&self) -> usize {
        self.graphs.len()
    }

    /// Bytes of graph pools: live and free inside.
    pub fn graph_bytes(&self) -> u64 {
        let free: u64 = self
            .arenas
            .iter()
            .filter(|a| matches!(a.owner, Owner::Graph(_)))
            .map(|a| a.arena.free_bytes())
            .sum();
        let live: u64 = self
            .live
            .values()
            .filter(|b| matches!(self.arenas[b.owner as usize].owner, Owner::Graph(_)))
            .map(|b| b.place.granted)
            .sum();
        free + live
    }

    pub(super) fn capture_underway(&mut self) -> bool {
        if self.active.is_empty() {
            return false;
        }
        self.purge_seen();
        !self.active.is_empty()
    }

    /// The arena for an allocation on `stream` when that stream captures into a pool we know.
    pub(super) fn capturing_owner(&mut self, stream: StreamId) -> Option<u32> {
        let capture = self.device.capture(stream)?;
        if let Some(active) = self
            .active
            .iter()
            .find(|a| a.seen.is_some_and(|(c, _)| c == capture))
        {
            return Some(active.owner);
        }
        if let Some(fresh) = self.active.iter_mut().rev().find(|a| a.seen.is_none()) {
            fresh.seen = Some((capture, stream));
            return Some(fresh.owner);
        }
        let mut back = self.suspects.pop()?;
        back.seen = Some((capture, stream));
        self.active.push(back);
        Some(back.owner)
    }

    /// Drop captures whose stream does not capture any more: they failed and nobody told us.
    fn purge_seen(&mut self) {
        let mut gone = Vec::new();
        let device = &mut self.device;
        self.active.retain(|a| {
            let stale = a
                .seen
                .is_some_and(|(id, stream)| device.capture(stream) != Some(id));
            if stale {
                gone.push(a.id);
            }
            !stale
        });
        for id in gone {
            self.counters.stale_captures += 1;
            self.abandon(id);
        }
    }

    /// As [`Heap::purge_seen`]; captures in which nothing was allocated yet become suspects: they may have failed, or
    /// their first allocation is still to come (then they are taken up again).
    pub(super) fn purge_captures(&mut self) {
        self.purge_seen();
        let (seen, unseen) = std::mem::take(&mut self.active)
            .into_iter()
            .partition(|a| a.seen.is_some());
        self.active = seen;
        self.suspects.extend::<Vec<ActiveCapture>>(unseen);
        while self.suspects.len() > SUSPECTS {
            let gone = self.suspects.remove(0);
            self.counters.stale_captures += 1;
            self.abandon(gone.id);
        }
    }

    /// A failed capture: nobody will release this use of the pool.
    fn abandon(&mut self, id: PoolId) {
        if let Some(position) = self.graphs.iter().position(|p| p.id == id) {
            self.graphs[position].uses = self.graphs[position].uses.saturating_sub(1);
            self.graphs[position].abandoned += 1;
            if self.graphs[position].uses == 0 {
                let pool = self.graphs.remove(position);
                self.return_graph_memory(pool.owner);
            }
        }
    }

    fn reuse_or_add(&mut self, id: PoolId) -> u32 {
        let idle = (0..self.arenas.len()).find(|&i| {
            let owned = &self.arenas[i];
            matches!(owned.owner, Owner::Graph(_))
                && owned.live == 0
                && !self.graphs.iter().any(|p| p.owner as usize == i)
        });
        if let Some(index) = idle {
            self.arenas[index].owner = Owner::Graph(id);
            return index as u32;
        }
        self.add_arena(Owner::Graph(id))
    }

    /// Free memory of a released pool goes to the main arena after the device is idle; blocks that are still live
    /// follow when they are freed and the memory is asked for again.
    fn return_graph_memory(&mut self, owner: u32) {
        if self.arenas[owner as usize].arena.runs.free_units() == 0 || !self.active.is_empty() {
            return;
        }
        if self.wait_for_device() {
            for (start, len) in self.arenas[owner as usize].arena.runs.drain() {
                self.arenas[0].arena.runs.give(start, len);
            }
        }
    }

    /// Collect what released pools still hold.
    pub(super) fn collect_released(&mut self) {
        if !self.active.is_empty() {
            return;
        }
        for index in 0..self.arenas.len() as u32 {
            let is_graph = matches!(self.arenas[index as usize].owner, Owner::Graph(_));
            if is_graph && !self.graphs.iter().any(|p| p.owner == index) {
                self.return_graph_memory(index);
            }
        }
    }
}
