//! Python binding of the ring core.
use pyo3::prelude::*;

/// Native part of `loongforge_data`.
#[pymodule]
mod _core {
    /// Version of the native part.
    #[pymodule_export]
    const VERSION: &str = env!("CARGO_PKG_VERSION");
}
