//! Python binding of the ring core.

#![deny(unsafe_op_in_unsafe_fn)]

mod board;
mod errors;
mod lease;
mod pixel;
mod ring;

use pyo3::prelude::*;

/// Native part of `loongforge_data`.
#[pymodule]
mod _core {
    /// Version of the native part.
    #[pymodule_export]
    const VERSION: &str = env!("CARGO_PKG_VERSION");

    #[pymodule_export]
    use super::pixel::{FrameConverter, checksum, vector_kernels};

    #[pymodule_export]
    use super::board::Board;

    #[pymodule_export]
    use super::ring::Ring;

    #[pymodule_export]
    use super::lease::{Lease, SlotView};
}
