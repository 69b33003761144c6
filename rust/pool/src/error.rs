//! The one error type of the crate.

use thiserror::Error;

/// Why a request could not be met.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PoolError {
    /// No free run holds the request and the backing could not grow.
    #[error(
        "no room for {size} bytes: {free} bytes are free, the largest free run is {largest} bytes"
    )]
    OutOfMemory {
        /// Requested bytes.
        size: u64,
        /// Free bytes in total.
        free: u64,
        /// Largest free run in bytes.
        largest: u64,
    },
    /// The offset or address is not the start of a live block.
    #[error("{address:#x} is not the start of a live block")]
    UnknownBlock {
        /// The offset or address given.
        address: u64,
    },
    /// A size that no pool can serve.
    #[error("a size of {size} bytes is outside 1..={max}")]
    BadSize {
        /// Requested bytes.
        size: u64,
        /// Largest allowed request in bytes.
        max: u64,
    },
    /// A trace that contradicts itself.
    #[error("trace event {event}: {what}")]
    BadTrace {
        /// Index of the event.
        event: usize,
        /// What is wrong with it.
        what: String,
    },
    /// A plan or a saved state that contradicts itself or does not belong here.
    #[error("plan: {what}")]
    BadPlan {
        /// What is wrong with it.
        what: String,
    },
    /// A step call out of order.
    #[error("step: {what}")]
    BadStep {
        /// What is wrong and what to do.
        what: String,
    },
    /// The device refused a call.
    #[error("device call {call} failed with code {code}")]
    Device {
        /// Name of the call.
        call: &'static str,
        /// Code the device returned.
        code: i32,
    },
}

/// Result of the crate.
pub type Result<T> = std::result::Result<T, PoolError>;
