//! Colour matrices as fixed-point numbers.

/// Matrix that a video was encoded with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Matrix {
    /// ITU-R BT.601, also the rule for files without a tag.
    Bt601,
    /// ITU-R BT.709.
    Bt709,
    /// ITU-R BT.2020, non-constant luminance.
    Bt2020,
    /// SMPTE 240M.
    Smpte240m,
    /// FCC 73.682.
    Fcc,
}

impl Matrix {
    /// Weights of red and blue in luma.
    #[must_use]
    pub fn luma_weights(self) -> (f64, f64) {
        match self {
            Self::Bt601 => (0.299, 0.114),
            Self::Bt709 => (0.2126, 0.0722),
            Self::Bt2020 => (0.2627, 0.0593),
            Self::Smpte240m => (0.212, 0.087),
            Self::Fcc => (0.30, 0.11),
        }
    }
}

/// Bits kept of a sample between the stages: 8-bit input is shifted up by 7.
pub const SAMPLE_BITS: u32 = 15;
/// Value of a chroma sample that means "no colour".
pub const NEUTRAL: i16 = 1 << (SAMPLE_BITS - 1);
/// Fraction bits of the sums that are clamped to 8 bits.
pub const COLOUR_SHIFT: u32 = 5;

/// Coefficients for samples of [`SAMPLE_BITS`] bits. A term is `multiply(sample, coefficient)`; the sum of the terms
/// and the bias is shifted right by [`COLOUR_SHIFT`]. All of it fits 16 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Coefficients {
    /// Luma to each channel.
    pub y: i16,
    /// V to red.
    pub rv: i16,
    /// U to green.
    pub gu: i16,
    /// V to green.
    pub gv: i16,
    /// U to blue.
    pub bu: i16,
    /// Added to each channel: the luma offset and half a level for rounding.
    pub bias: i16,
}

/// Product of two 16-bit fractions, rounded: `(a * b) / 32768`. What the vector instruction of the same kind gives.
#[must_use]
pub fn multiply(a: i16, b: i16) -> i16 {
    ((((i32::from(a) * i32::from(b)) >> 14) + 1) >> 1) as i16
}

impl Coefficients {
    /// Computes the coefficients for a matrix, range and bit depth (8 to 16).
    #[must_use]
    pub fn new(matrix: Matrix, full_range: bool, depth: u32) -> Self {
        let (kr, kb) = matrix.luma_weights();
        let kg = 1.0 - kr - kb;
        let unit = f64::from(1_u32 << SAMPLE_BITS) / f64::from(1_u32 << depth);
        let (span_y, span_c, y_zero) = if full_range {
            let top = f64::from((1_u32 << depth) - 1) * unit;
            (top, top, 0.0)
        } else {
            let step = f64::from(1_u32 << SAMPLE_BITS) / 256.0;
            (219.0 * step, 224.0 * step, 16.0 * step)
        };
        let one = f64::from(1_u32 << (SAMPLE_BITS + COLOUR_SHIFT));
        let fix = |value: f64| (value * one).round() as i16;
        let y = fix(255.0 / span_y);
        let chroma = 255.0 / span_c;
        let half = f64::from(1_u32 << (COLOUR_SHIFT - 1));
        Self {
            y,
            rv: fix(2.0 * (1.0 - kr) * chroma),
            gu: fix(-2.0 * (1.0 - kb) * kb / kg * chroma),
            gv: fix(-2.0 * (1.0 - kr) * kr / kg * chroma),
            bu: fix(2.0 * (1.0 - kb) * chroma),
            bias: (half - f64::from(y) * y_zero / 32768.0).round() as i16,
        }
    }
}
