//! Labels, settings and counters of a heap.

use crate::SLAB_MAX;

/// How long a tensor lives and who may move it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(usize)]
pub enum Label {
    /// Activations and temporaries: planned, gone by the end of the step.
    #[default]
    Ephemeral = 0,
    /// Weights: placed once at the high end, never moved.
    Persistent = 1,
    /// Gradient and optimizer buffers: may move between device and host by phase.
    Migratable = 2,
}

/// Number of labels.
pub const LABELS: usize = 3;
/// Names of the labels, in order.
pub const LABEL_NAMES: [&str; LABELS] = ["ephemeral", "persistent", "migratable"];

impl Label {
    /// The label with this number; anything unknown is ephemeral.
    pub fn from_index(index: usize) -> Self {
        match index {
            1 => Self::Persistent,
            2 => Self::Migratable,
            _ => Self::Ephemeral,
        }
    }
}

/// Settings of a heap.
#[derive(Debug, Clone, Copy)]
pub struct HeapConfig {
    /// Bytes reserved at the first allocation (0: grow from nothing).
    pub initial_bytes: u64,
    /// Smallest growth in bytes (0: never grow).
    pub grow_bytes: u64,
    /// Most bytes ever taken from the device (`u64::MAX`: no limit of our own).
    pub limit_bytes: u64,
    /// Requests up to this size use the slab.
    pub slab_max: u64,
    /// Most plans made; after that the last one stays.
    pub max_plans: u32,
}

impl Default for HeapConfig {
    fn default() -> Self {
        Self {
            initial_bytes: 0,
            grow_bytes: 256 << 20,
            limit_bytes: u64::MAX,
            slab_max: SLAB_MAX,
            max_plans: 64,
        }
    }
}

/// Counters that only grow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Reservations taken from the device.
    pub device_allocs: u64,
    /// Reservations given back.
    pub device_frees: u64,
    /// Commits of virtual memory.
    pub commits: u64,
    /// Free memory moved between streams behind an event.
    pub transfers: u64,
    /// Blocks that waited for another stream after being freed.
    pub deferred_frees: u64,
    /// Frees of addresses we never gave out.
    pub unknown_frees: u64,
    /// Requests that failed.
    pub ooms: u64,
    /// Plans made.
    pub plans: u64,
    /// Plans dissolved in mid-step because the step did not fit them.
    pub dissolved: u64,
    /// Device-wide waits.
    pub synchronizations: u64,
    /// Captures that ended without telling us.
    pub stale_captures: u64,
}
