//! LoongForge ring core: slots in shared memory, a board of jobs, and pixel conversion. Knows no Python.

#![deny(unsafe_op_in_unsafe_fn)]
// `--cfg loom` builds the state machines alone, for the model checker.
#![allow(unexpected_cfgs)]

pub mod error;
pub mod protocol;
pub mod sync;

#[cfg(not(loom))]
pub mod checksum;
#[cfg(not(loom))]
pub mod futex;
#[cfg(not(loom))]
pub mod pixel;
#[cfg(not(loom))]
pub mod ring;
#[cfg(not(loom))]
pub mod shm;

pub use error::{Error, Result};
