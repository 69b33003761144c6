//! The one place where errors of the core become Python exceptions.

use std::time::Duration;

use loongforge_ring::Error;
use pyo3::exceptions::{PyOSError, PyRuntimeError, PyTimeoutError, PyValueError};
use pyo3::{PyErr, PyResult};

/// Reads a time limit in seconds.
pub fn seconds(timeout: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(timeout).map_err(|_| {
        PyValueError::new_err(format!(
            "timeout is {timeout}, allowed is a number of seconds >= 0"
        ))
    })
}

/// Maps an error of the core to the Python exception of its kind.
pub fn to_python(error: Error) -> PyErr {
    match error {
        Error::Argument { .. } | Error::Plane { .. } | Error::Layout { .. } => {
            PyValueError::new_err(error.to_string())
        }
        Error::Timeout(_) => PyTimeoutError::new_err(error.to_string()),
        Error::State { .. } => PyRuntimeError::new_err(error.to_string()),
        Error::System { source, .. } => match source.raw_os_error() {
            Some(code) => PyOSError::new_err((code, source.to_string())),
            None => PyOSError::new_err(source.to_string()),
        },
    }
}
