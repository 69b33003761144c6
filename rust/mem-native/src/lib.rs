//! Python binding of the pool core.
use pyo3::prelude::*;

/// Native part of `loongforge_mem`.
#[pymodule]
mod _core {
    /// Version of the native part.
    #[pymodule_export]
    const VERSION: &str = env!("CARGO_PKG_VERSION");
}
