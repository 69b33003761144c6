//! Portable kernels. They define the result; the vector kernels must give the same bits.

use super::colour::{COLOUR_SHIFT, Coefficients, NEUTRAL, SAMPLE_BITS, multiply};
use super::filter::{Filter, WEIGHT_BITS};
use super::line::Rows;

/// Weighted sum of source rows into one line of 15-bit samples; columns `[from, to)`.
pub fn vertical(
    rows: &Rows<'_>,
    first: usize,
    weights: &[i16],
    from: usize,
    to: usize,
    out: &mut [i16],
) {
    let shift = WEIGHT_BITS + rows.depth - SAMPLE_BITS;
    let round = 1_i64 << (shift - 1);
    for (x, value) in out.iter_mut().enumerate().take(to).skip(from) {
        let mut sum = round;
        for (k, weight) in weights.iter().enumerate() {
            if *weight != 0 {
                sum += i64::from(*weight) * i64::from(rows.sample(first + k, x));
            }
        }
        *value = (sum >> shift).min(i64::from(i16::MAX)) as i16;
    }
}

/// Weighted sum along a line: 15-bit samples in, 15-bit samples out.
pub fn horizontal(line: &[i16], filter: &Filter, out: &mut [i16]) {
    for (i, start) in filter.starts.iter().enumerate() {
        let mut sum = 1_i32 << (WEIGHT_BITS - 1);
        for (k, weight) in filter.row(i).iter().enumerate() {
            if *weight != 0 {
                sum += i32::from(*weight) * i32::from(line[start + k]);
            }
        }
        out[i] = (sum >> WEIGHT_BITS) as i16;
    }
}

/// Y, U, V lines of 15-bit samples to interleaved 8-bit RGB.
pub fn colour(y: &[i16], u: &[i16], v: &[i16], c: &Coefficients, out: &mut [u8]) {
    for (x, pixel) in out.chunks_exact_mut(3).enumerate() {
        let luma = multiply(y[x], c.y) + c.bias;
        let (u, v) = (u[x] - NEUTRAL, v[x] - NEUTRAL);
        let sums = [
            luma + multiply(v, c.rv),
            luma + (multiply(u, c.gu) + multiply(v, c.gv)),
            luma + multiply(u, c.bu),
        ];
        for (channel, sum) in pixel.iter_mut().zip(sums) {
            *channel = (sum >> COLOUR_SHIFT).clamp(0, 255) as u8;
        }
    }
}
