//! From the planes of a decoded picture to interleaved 8-bit RGB: crop, resize, colour matrix and rotation at once.
//!
//! Definition of the result (computed in float64 by the tests):
//! * without a change of size, chroma samples are replicated;
//! * with a change of size, each plane is resampled straight to the output grid by the filter of [`filter`], chroma
//!   samples counting as centred on the luma samples they cover;
//! * then the colour matrix is applied, clamped to 0..255 and rounded.

pub mod colour;
mod convert;
pub mod filter;
pub mod line;
mod picture;
pub mod scalar;
mod turn;

#[cfg(target_arch = "x86_64")]
pub mod avx2;

pub use convert::{Converter, Scratch};
pub use picture::{Layout, Picture};
pub use turn::{Crop, Rotation};

use colour::Matrix;

/// Largest width or height that is accepted.
pub const MAX_SIDE: usize = 1 << 15;

/// Which kernels to use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kernels {
    /// The fastest that this processor has.
    Auto,
    /// Portable code.
    Scalar,
}

/// Colour tags of a video.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Colour {
    /// Matrix.
    pub matrix: Matrix,
    /// True for 0..255, false for 16..235.
    pub full_range: bool,
}

/// True when the vector kernels can run here.
#[must_use]
pub fn vector_available() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        std::arch::is_x86_feature_detected!("avx2")
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        false
    }
}
