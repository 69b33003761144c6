//! LoongForge ring core: slots in shared memory, a board of jobs, and pixel conversion. Knows no Python.

#![deny(unsafe_op_in_unsafe_fn)]

pub mod error;
pub mod pixel;

pub use error::{Error, Result};
