//! Errors of the crate.

use std::time::Duration;

/// Everything that can go wrong in the ring, the board and the pixel conversion.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A size or number is outside of what is possible.
    #[error("{name} is {actual}, allowed is {allowed}")]
    Argument {
        /// Name of the argument.
        name: &'static str,
        /// Its value.
        actual: String,
        /// What is allowed.
        allowed: String,
    },
    /// A plane of the picture is smaller than the picture.
    #[error(
        "plane {plane} has {actual} bytes, too few for {width} x {height} samples at {stride} bytes a row"
    )]
    Plane {
        /// Number of the plane.
        plane: usize,
        /// Bytes that are there.
        actual: usize,
        /// Samples per row.
        width: usize,
        /// Rows.
        height: usize,
        /// Bytes from row to row.
        stride: usize,
    },
    /// The operating system refused.
    #[error("{call} failed: {source}")]
    System {
        /// System call.
        call: &'static str,
        /// Reason.
        source: std::io::Error,
    },
    /// Nothing happened within the time limit.
    #[error("waited {0:?} in vain")]
    Timeout(Duration),
    /// A slot is not in the state that the call needs.
    #[error("slot {slot} is {actual}, {call} needs {wanted}")]
    State {
        /// Number of the slot.
        slot: usize,
        /// State it is in.
        actual: String,
        /// State that is needed.
        wanted: &'static str,
        /// What was called.
        call: &'static str,
    },
    /// A shared mapping does not hold what it should.
    #[error(
        "shared memory holds {actual}, expected {expected}: it belongs to another program or version"
    )]
    Layout {
        /// What was found.
        actual: String,
        /// What was expected.
        expected: String,
    },
}

/// Shorthand for results of this crate.
pub type Result<T> = std::result::Result<T, Error>;

#[cfg(not(loom))]
pub(crate) fn argument(
    name: &'static str,
    actual: impl ToString,
    allowed: impl Into<String>,
) -> Error {
    Error::Argument {
        name,
        actual: actual.to_string(),
        allowed: allowed.into(),
    }
}
