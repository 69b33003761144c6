//! Access to the rows of one plane, and their expansion to 15-bit lines.

use super::colour::SAMPLE_BITS;

/// The rows of one plane of samples, 8 bits each or 16 bits little-endian.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a> {
    data: &'a [u8],
    stride: usize,
    /// Samples per row.
    pub width: usize,
    /// Number of rows.
    pub height: usize,
    /// Significant bits, 8 to 16.
    pub depth: u32,
}

impl<'a> Rows<'a> {
    /// Wraps a plane; `None` when the buffer is too small for it.
    #[must_use]
    pub fn new(
        data: &'a [u8],
        stride: usize,
        width: usize,
        height: usize,
        depth: u32,
    ) -> Option<Self> {
        let row = width.checked_mul(bytes(depth))?;
        let need = stride
            .checked_mul(height.checked_sub(1)?)?
            .checked_add(row)?;
        (width > 0 && stride >= row && data.len() >= need && (8..=16).contains(&depth)).then_some(
            Self {
                data,
                stride,
                width,
                height,
                depth,
            },
        )
    }

    /// Bytes of row `y`.
    #[must_use]
    pub fn row(&self, y: usize) -> &'a [u8] {
        let start = y * self.stride;
        &self.data[start..start + self.width * bytes(self.depth)]
    }

    /// Sample at row `y`, column `x`.
    #[must_use]
    pub fn sample(&self, y: usize, x: usize) -> u16 {
        let row = self.row(y);
        if self.depth == 8 {
            u16::from(row[x])
        } else {
            u16::from_le_bytes([row[2 * x], row[2 * x + 1]])
        }
    }

    /// Writes columns `[from, from + out.len() * step)` of row `y` as 15-bit samples; sample `i` of the output is
    /// column `from_column(i)`, replicated when `shift` is 1.
    pub fn expand(&self, y: usize, from: usize, shift: u32, out: &mut [i16]) {
        let row = self.row(y);
        let last = self.width - 1;
        if self.depth == 8 {
            let up = SAMPLE_BITS - 8;
            if shift == 0 {
                for (o, s) in out.iter_mut().zip(&row[from..]) {
                    *o = i16::from(*s) << up;
                }
            } else if from.is_multiple_of(2) {
                let source = &row[from / 2..];
                for (pair, s) in out.chunks_exact_mut(2).zip(source) {
                    let value = i16::from(*s) << up;
                    pair[0] = value;
                    pair[1] = value;
                }
                if out.len() % 2 == 1 {
                    let i = out.len() - 1;
                    out[i] = i16::from(row[((from + i) >> 1).min(last)]) << up;
                }
            } else {
                for (i, o) in out.iter_mut().enumerate() {
                    *o = i16::from(row[((from + i) >> 1).min(last)]) << up;
                }
            }
        } else {
            for (i, o) in out.iter_mut().enumerate() {
                let value = i32::from(self.sample(y, ((from + i) >> shift).min(last)));
                *o = if self.depth <= SAMPLE_BITS {
                    (value << (SAMPLE_BITS - self.depth)) as i16
                } else {
                    (value >> (self.depth - SAMPLE_BITS)) as i16
                };
            }
        }
    }
}

/// Bytes per sample of a bit depth.
#[must_use]
pub fn bytes(depth: u32) -> usize {
    if depth == 8 { 1 } else { 2 }
}
