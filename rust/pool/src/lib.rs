//! Placement of memory blocks: address arithmetic only.
//!
//! Nothing in this crate knows Python or CUDA. Layers, bottom up:
//!
//! * [`runs`]: free runs of equal units, indexed by order, coalesced by address (best fit);
//! * [`lives`]: which sizes live long, so that such blocks lie together;
//! * [`slab`]: small objects inside spans taken from the run index;
//! * [`arena`]: run index and slab together, the allocator of one stream;
//! * [`buddy`], [`caching`]: the policies we compare with;
//! * [`trace`], [`planner`], [`replay`]: a recorded step, offline offsets for it, guarded hits by index;
//! * [`device`], [`heap`]: streams, graph pools, growth and steps over an abstract device;
//! * [`stats`], [`simulate`]: the three numbers and the comparison of policies on a trace.

#![deny(unsafe_code)]

pub mod arena;
pub mod buddy;
pub mod caching;
pub mod device;
pub mod error;
pub mod hash;
pub mod heap;
pub mod lives;
pub mod planner;
pub mod replay;
pub mod runs;
pub mod simulate;
pub mod slab;
pub mod stats;
pub mod trace;

pub use error::PoolError;

/// Smallest granted size in bytes: torch promises 512-byte alignment of device memory.
pub const QUANTUM: u64 = 512;
/// Unit of the run index in bytes.
pub const UNIT: u64 = 64 * 1024;
/// Quanta in one unit.
pub const QUANTA_PER_UNIT: u64 = UNIT / QUANTUM;
/// Bytes of one slab span.
pub const SPAN: u64 = 2 * 1024 * 1024;
/// Requests up to this size are served by the slab (bytes).
pub const SLAB_MAX: u64 = 512 * 1024;

/// Round `size` up to a multiple of `to` (a power of two), or `None` on overflow.
pub fn round_up(size: u64, to: u64) -> Option<u64> {
    size.checked_add(to - 1).map(|v| v & !(to - 1))
}
