//! What the heap tells about itself.

use std::fmt::Write as _;

use super::{Counters, Heap, LABEL_NAMES, LABELS, Label, Owner};
use crate::UNIT;
use crate::device::StreamId;
use crate::replay::ReplayCounters;
use crate::stats::{Gauge, waste};

/// Snapshot of counters and gauges.
#[derive(Debug, Clone, Default)]
pub struct HeapStats {
    /// Requested bytes of live blocks, by label.
    pub labels: [Gauge; LABELS],
    /// Live blocks.
    pub requests: Gauge,
    /// Requested bytes.
    pub requested: Gauge,
    /// Granted bytes (after rounding).
    pub granted: Gauge,
    /// Bytes taken from the device.
    pub reserved: Gauge,
    /// Bytes of pages that were ever used: what a device that commits page by page would hold.
    pub touched: Gauge,
    /// Free bytes over all streams.
    pub free: u64,
    /// Largest free run of the main arena or of a stream.
    pub largest_free: u64,
    /// Blocks freed but still used by another stream.
    pub waiting: u64,
    /// Bytes held for graph pools.
    pub graph_bytes: u64,
    /// Graph pools held.
    pub graph_pools: u64,
    /// Streams with an arena.
    pub streams: u64,
    /// Bytes of the carved plan region.
    pub plan_bytes: u64,
    /// Replay counters of the plan in force.
    pub replay: ReplayCounters,
    /// Counters.
    pub counters: Counters,
    /// Internal, reserve and external waste (see [`crate::stats::Waste`]).
    pub internal: f64,
    /// Reserve overhead against pages in use.
    pub reserve: f64,
    /// Free-list fragmentation.
    pub external: f64,
}

impl Heap {
    /// All counters and gauges. O(live blocks), because graph memory is summed up.
    pub fn stats(&self) -> HeapStats {
        let (free, largest_free) = self.free_and_largest();
        HeapStats {
            labels: self.labels,
            requests: self.requests,
            requested: self.requested,
            granted: self.granted,
            reserved: self.reserved,
            touched: self.touched,
            free,
            largest_free,
            waiting: self.waiting() as u64,
            graph_bytes: self.graph_bytes(),
            graph_pools: self.graphs.len() as u64,
            streams: self.by_stream.len() as u64,
            plan_bytes: self.plan.as_ref().map_or(0, |c| {
                if c.region.is_some() {
                    u64::from(c.units) * UNIT
                } else {
                    0
                }
            }),
            replay: self
                .plan
                .as_ref()
                .map(|c| c.replay.counters)
                .unwrap_or_default(),
            counters: self.counters,
            internal: waste(self.requested.current, self.granted.current),
            reserve: waste(self.requested.peak, self.touched.peak),
            external: waste(largest_free, free),
        }
    }

    /// Forget peaks: they start again from the current values.
    pub fn reset_peaks(&mut self) {
        let all = self.labels.iter_mut().chain([
            &mut self.requests,
            &mut self.requested,
            &mut self.granted,
            &mut self.reserved,
            &mut self.touched,
        ]);
        all.for_each(|g| g.peak = g.current);
    }

    /// Forget running totals.
    pub fn reset_totals(&mut self) {
        let all = self.labels.iter_mut().chain([
            &mut self.requests,
            &mut self.requested,
            &mut self.granted,
            &mut self.reserved,
            &mut self.touched,
        ]);
        all.for_each(|g| {
            g.allocated = 0;
            g.freed = 0;
        });
        self.alloc_time = crate::stats::Histogram::default();
        self.free_time = crate::stats::Histogram::default();
    }

    /// Text of the last out-of-memory error.
    pub fn last_oom(&self) -> Option<&str> {
        self.last_oom.as_deref()
    }

    /// Set the most bytes that may be taken from the device.
    pub fn set_limit(&mut self, bytes: u64) {
        self.config.limit_bytes = bytes;
    }

    pub(super) fn free_and_largest(&self) -> (u64, u64) {
        let streams = self
            .arenas
            .iter()
            .filter(|a| matches!(a.owner, Owner::Stream(_)));
        streams.fold((0, 0), |(free, largest), a| {
            (
                free + a.arena.free_bytes(),
                largest.max(a.arena.largest_free()),
            )
        })
    }

    pub(super) fn describe_oom(&mut self, size: u64, stream: StreamId, label: Label) -> String {
        let (free, largest) = self.free_and_largest();
        let phase = if self.step.phase.is_empty() {
            if self.step.open {
                "step"
            } else {
                "outside a step"
            }
        } else {
            &self.step.phase
        };
        let mut text = format!(
            "CUDA out of memory. Tried to allocate {} for label {} in phase {phase} (stream {stream:#x}). \
             Reserved {} (limit {}), in use {}, free {}, largest hole {}, held by graph pools {}, waiting for other \
             streams {} blocks.",
            bytes(size),
            LABEL_NAMES[label as usize],
            bytes(self.reserved.current),
            if self.config.limit_bytes == u64::MAX {
                "none".to_owned()
            } else {
                bytes(self.config.limit_bytes)
            },
            bytes(self.requested.current),
            bytes(free),
            bytes(largest),
            bytes(self.graph_bytes()),
            self.waiting(),
        );
        for (name, gauge) in LABEL_NAMES.iter().zip(&self.labels) {
            let _ = write!(
                text,
                " {name}: {} (peak {}).",
                bytes(gauge.current),
                bytes(gauge.peak)
            );
        }
        let available = self.device.available();
        if let Some(available) = available {
            let _ = write!(text, " The device could give {}.", bytes(available));
        }
        text.push_str(" Ways out:");
        if free >= size && self.plan.is_none() {
            text.push_str(
                " free memory is scattered, so let steps be planned (MemoryConfig(plan=True));",
            );
        }
        if self.waiting() > 0 {
            text.push_str(" let other streams finish before memory they read is asked for again;");
        }
        if self.config.limit_bytes != u64::MAX && available.is_some_and(|a| a >= size) {
            text.push_str(" raise limit_gb;");
        }
        text.push_str(
            " a smaller micro-batch, recomputation or offload (loongforge_mem.plan_memory finds what fits).",
        );
        text
    }
}

/// A size with its unit, three significant digits after the point.
pub fn bytes(n: u64) -> String {
    match n {
        0..=1023 => format!("{n} B"),
        1024..=1_048_575 => format!("{:.2} KiB", n as f64 / 1024.0),
        1_048_576..=1_073_741_823 => format!("{:.2} MiB", n as f64 / 1_048_576.0),
        _ => format!("{:.2} GiB", n as f64 / 1_073_741_824.0),
    }
}
