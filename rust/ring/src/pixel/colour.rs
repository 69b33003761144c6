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

/// Bits kept of a sample between the stages: 8-bit input is shifted up by 6.
pub const SAMPLE_BITS: u32 = 14;
/// Right shift from (sample x coefficient) to an 8-bit output.
pub const COLOUR_SHIFT: u32 = 19;

/// Coefficients for samples of [`SAMPLE_BITS`] bits; outputs are shifted right by [`COLOUR_SHIFT`].
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
    /// Added to red before the shift (offsets and rounding).
    pub r_bias: i32,
    /// Added to green before the shift.
    pub g_bias: i32,
    /// Added to blue before the shift.
    pub b_bias: i32,
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
        let c_zero = f64::from(1_u32 << (SAMPLE_BITS - 1));
        let one = f64::from(1_u32 << COLOUR_SHIFT);
        let fix = |value: f64| (value * one).round() as i16;
        let y = fix(255.0 / span_y);
        let chroma = 255.0 / span_c;
        let rv = fix(2.0 * (1.0 - kr) * chroma);
        let bu = fix(2.0 * (1.0 - kb) * chroma);
        let gu = fix(-2.0 * (1.0 - kb) * kb / kg * chroma);
        let gv = fix(-2.0 * (1.0 - kr) * kr / kg * chroma);
        let half = 1_i32 << (COLOUR_SHIFT - 1);
        let y_off = (f64::from(y) * y_zero).round() as i32;
        let c_off = |c: i32| (f64::from(c) * c_zero).round() as i32;
        Self {
            y,
            rv,
            gu,
            gv,
            bu,
            r_bias: half - y_off - c_off(i32::from(rv)),
            g_bias: half - y_off - c_off(i32::from(gu) + i32::from(gv)),
            b_bias: half - y_off - c_off(i32::from(bu)),
        }
    }
}
