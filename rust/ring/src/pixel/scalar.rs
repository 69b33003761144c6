//! Portable kernels. They define the result; the vector kernels must give the same bits.

use super::colour::{COLOUR_SHIFT, Coefficients};
use super::filter::{Filter, WEIGHT_BITS};
use super::line::Rows;

/// Weighted sum of source rows into one line of 14-bit samples; columns `[from, to)`.
pub fn vertical(
    rows: &Rows<'_>,
    first: usize,
    weights: &[i16],
    from: usize,
    to: usize,
    out: &mut [i16],
) {
    let shift = rows.depth;
    let round = 1_i64 << (shift - 1);
    for (x, value) in out.iter_mut().enumerate().take(to).skip(from) {
        let mut sum = round;
        for (k, weight) in weights.iter().enumerate() {
            if *weight != 0 {
                sum += i64::from(*weight) * i64::from(rows.sample(first + k, x));
            }
        }
        *value = (sum >> shift) as i16;
    }
}

/// Weighted sum along a line: 14-bit samples in, 14-bit samples out.
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

/// 14-bit Y, U, V lines to interleaved 8-bit RGB.
pub fn colour(y: &[i16], u: &[i16], v: &[i16], c: &Coefficients, out: &mut [u8]) {
    for (x, pixel) in out.chunks_exact_mut(3).enumerate() {
        let (y, u, v) = (i32::from(y[x]), i32::from(u[x]), i32::from(v[x]));
        let luma = i32::from(c.y) * y;
        let red = luma + i32::from(c.rv) * v + c.r_bias;
        let green = luma + i32::from(c.gu) * u + i32::from(c.gv) * v + c.g_bias;
        let blue = luma + i32::from(c.bu) * u + c.b_bias;
        pixel[0] = (red >> COLOUR_SHIFT).clamp(0, 255) as u8;
        pixel[1] = (green >> COLOUR_SHIFT).clamp(0, 255) as u8;
        pixel[2] = (blue >> COLOUR_SHIFT).clamp(0, 255) as u8;
    }
}
