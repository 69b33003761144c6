//! AVX2 kernels; bit for bit what `scalar` computes.

use std::arch::x86_64::{
    __m128i, __m256i, _mm_cvtsi32_si128, _mm_loadl_epi64, _mm_loadu_si128, _mm_or_si128,
    _mm_setr_epi8, _mm_shuffle_epi8, _mm_storeu_si128, _mm_unpacklo_epi64, _mm256_add_epi32,
    _mm256_castsi256_si128, _mm256_cvtepu8_epi16, _mm256_extracti128_si256, _mm256_hadd_epi32,
    _mm256_loadu_si256, _mm256_madd_epi16, _mm256_packs_epi32, _mm256_packus_epi16,
    _mm256_permute4x64_epi64, _mm256_set_m128i, _mm256_set1_epi32, _mm256_setzero_si256,
    _mm256_sra_epi32, _mm256_srai_epi32, _mm256_storeu_si256, _mm256_unpackhi_epi16,
    _mm256_unpacklo_epi16,
};

use super::colour::{COLOUR_SHIFT, Coefficients};
use super::filter::{Filter, WEIGHT_BITS};
use super::line::Rows;
use super::scalar;

/// Most rows that one output row is made of in the vector kernel; more go through the scalar one.
const MAX_ROWS: usize = 64;

fn pair(a: i16, b: i16) -> i32 {
    (i32::from(b) << 16) | (i32::from(a) & 0xffff)
}

/// See [`scalar::vertical`]; depth up to 14.
///
/// # Safety
/// The processor has AVX2.
#[target_feature(enable = "avx2")]
pub unsafe fn vertical(
    rows: &Rows<'_>,
    first: usize,
    weights: &[i16],
    from: usize,
    to: usize,
    out: &mut [i16],
) {
    let end = to.min(rows.width).min(out.len());
    let blocks = end.saturating_sub(from) / 16;
    if weights.len() <= MAX_ROWS && blocks > 0 {
        // SAFETY: AVX2 is there; the rows exist and hold `end` samples, `out` too.
        unsafe {
            if rows.depth > 8 {
                blocks_of_rows::<true>(rows, first, weights, from, blocks, out);
            } else {
                blocks_of_rows::<false>(rows, first, weights, from, blocks, out);
            }
        }
        scalar::vertical(rows, first, weights, from + blocks * 16, to, out);
    } else {
        scalar::vertical(rows, first, weights, from, to, out);
    }
}

/// Vertical sums of `blocks` times 16 columns from `from` on.
///
/// # Safety
/// AVX2; rows `first .. first + weights.len()` exist; columns `from .. from + 16 * blocks` lie inside rows and `out`;
/// at most [`MAX_ROWS`] weights.
#[target_feature(enable = "avx2")]
unsafe fn blocks_of_rows<const WIDE: bool>(
    rows: &Rows<'_>,
    first: usize,
    weights: &[i16],
    from: usize,
    blocks: usize,
    out: &mut [i16],
) {
    let size = if WIDE { 2 } else { 1 };
    let mut taps = [(
        std::ptr::null::<u8>(),
        std::ptr::null::<u8>(),
        _mm256_setzero_si256(),
    ); MAX_ROWS / 2];
    let pairs = weights.len().div_ceil(2);
    for (k, tap) in taps.iter_mut().enumerate().take(pairs) {
        let (a, b) = (weights[2 * k], weights.get(2 * k + 1).copied());
        let upper = &rows.row(first + 2 * k)[from * size..];
        let lower = if b.is_some() {
            &rows.row(first + 2 * k + 1)[from * size..]
        } else {
            upper
        };
        *tap = (
            upper.as_ptr(),
            lower.as_ptr(),
            _mm256_set1_epi32(pair(a, b.unwrap_or(0))),
        );
    }
    let shift = _mm_cvtsi32_si128(rows.depth as i32);
    let round = _mm256_set1_epi32(1 << (rows.depth - 1));
    for block in 0..blocks {
        let x = block * 16;
        let (mut low, mut high) = (round, round);
        for (upper, lower, weight) in &taps[..pairs] {
            // SAFETY: the block lies inside both rows.
            let (a, b) = unsafe {
                if WIDE {
                    (
                        _mm256_loadu_si256(upper.add(2 * x).cast()),
                        _mm256_loadu_si256(lower.add(2 * x).cast()),
                    )
                } else {
                    (
                        _mm256_cvtepu8_epi16(_mm_loadu_si128(upper.add(x).cast())),
                        _mm256_cvtepu8_epi16(_mm_loadu_si128(lower.add(x).cast())),
                    )
                }
            };
            low = _mm256_add_epi32(low, _mm256_madd_epi16(_mm256_unpacklo_epi16(a, b), *weight));
            high = _mm256_add_epi32(
                high,
                _mm256_madd_epi16(_mm256_unpackhi_epi16(a, b), *weight),
            );
        }
        let packed =
            _mm256_packs_epi32(_mm256_sra_epi32(low, shift), _mm256_sra_epi32(high, shift));
        // SAFETY: from + x + 16 <= out.len().
        unsafe { _mm256_storeu_si256(out.as_mut_ptr().add(from + x).cast(), packed) };
    }
}

/// See [`scalar::horizontal`]. `line` should reach `taps` samples past each start; else
/// the scalar kernel runs.
///
/// # Safety
/// The processor has AVX2.
#[target_feature(enable = "avx2")]
pub unsafe fn horizontal(line: &[i16], filter: &Filter, out: &mut [i16]) {
    let outputs = filter.starts.len();
    let longest = filter.starts.iter().max().map_or(0, |s| s + filter.taps);
    if longest > line.len() || out.len() < outputs {
        scalar::horizontal(line, filter, out);
        return;
    }
    let blocks = outputs / 8;
    // SAFETY: every start + taps <= line.len() was checked above; weights has taps entries per output.
    unsafe {
        match filter.taps {
            4 => blocks_of_columns::<4>(line, filter, blocks, out),
            8 => blocks_of_columns::<8>(line, filter, blocks, out),
            _ => blocks_of_columns::<0>(line, filter, blocks, out),
        }
    }
    for i in blocks * 8..outputs {
        let mut sum = 1_i32 << (WEIGHT_BITS - 1);
        for (k, weight) in filter.row(i).iter().enumerate() {
            sum += i32::from(*weight) * i32::from(line[filter.starts[i] + k]);
        }
        out[i] = (sum >> WEIGHT_BITS) as i16;
    }
}

/// Horizontal sums of `blocks` times 8 outputs; `TAPS` is 4, 8, or 0 for a multiple of 8.
///
/// # Safety
/// AVX2; `starts[i] + taps <= line.len()` for all outputs; `out` has `8 * blocks` samples.
#[target_feature(enable = "avx2")]
unsafe fn blocks_of_columns<const TAPS: usize>(
    line: &[i16],
    filter: &Filter,
    blocks: usize,
    out: &mut [i16],
) {
    let round = _mm256_set1_epi32(1 << (WEIGHT_BITS - 1));
    let taps = if TAPS == 0 { filter.taps } else { TAPS };
    let from = line.as_ptr();
    for (block, starts) in filter.starts.chunks_exact(8).enumerate().take(blocks) {
        // SAFETY: weights has `taps` entries for each of the outputs `8 * block ..`.
        let weights = unsafe { filter.weights.as_ptr().add(block * 8 * taps) };
        // SAFETY: `starts[i] + taps <= line.len()`.
        let sums = unsafe {
            if TAPS == 4 {
                let two = |n: usize| -> __m256i {
                    let at = |o: usize| _mm_loadl_epi64(from.add(starts[n + o]).cast());
                    let low = _mm_unpacklo_epi64(at(0), at(1));
                    let high = _mm_unpacklo_epi64(at(4), at(5));
                    _mm256_madd_epi16(_mm256_set_m128i(high, low), join(weights.add(4 * n), 16))
                };
                _mm256_hadd_epi32(two(0), two(2))
            } else {
                let one = |n: usize| -> __m256i {
                    let mut sum = _mm256_setzero_si256();
                    let mut k = 0;
                    while k < taps {
                        let low = _mm_loadu_si128(from.add(starts[n] + k).cast());
                        let high = _mm_loadu_si128(from.add(starts[n + 4] + k).cast());
                        let w = join(weights.add(n * taps + k), 4 * taps);
                        sum = _mm256_add_epi32(
                            sum,
                            _mm256_madd_epi16(_mm256_set_m128i(high, low), w),
                        );
                        k += 8;
                    }
                    sum
                };
                _mm256_hadd_epi32(
                    _mm256_hadd_epi32(one(0), one(1)),
                    _mm256_hadd_epi32(one(2), one(3)),
                )
            }
        };
        let value = _mm256_srai_epi32::<{ WEIGHT_BITS as i32 }>(_mm256_add_epi32(sums, round));
        let packed = _mm256_permute4x64_epi64::<0b0000_1000>(_mm256_packs_epi32(value, value));
        // SAFETY: 8 * block + 8 <= out.len().
        unsafe {
            _mm_storeu_si128(
                out.as_mut_ptr().add(8 * block).cast(),
                _mm256_castsi256_si128(packed),
            );
        }
    }
}

/// Two groups of 8 weights, `distance` apart, as the halves of one register.
///
/// # Safety
/// AVX2; both groups can be read.
#[target_feature(enable = "avx2")]
unsafe fn join(weights: *const i16, distance: usize) -> __m256i {
    // SAFETY: by contract.
    unsafe {
        _mm256_set_m128i(
            _mm_loadu_si128(weights.add(distance).cast()),
            _mm_loadu_si128(weights.cast()),
        )
    }
}

/// See [`scalar::colour`].
///
/// # Safety
/// The processor has AVX2.
#[target_feature(enable = "avx2")]
#[allow(clippy::many_single_char_names)]
pub unsafe fn colour(y: &[i16], u: &[i16], v: &[i16], c: &Coefficients, out: &mut [u8]) {
    let pixels = out.len() / 3;
    let blocks = pixels.min(y.len()).min(u.len()).min(v.len()) / 16;
    let zero = _mm256_setzero_si256();
    let (yv_r, yu_b) = (
        _mm256_set1_epi32(pair(c.y, c.rv)),
        _mm256_set1_epi32(pair(c.y, c.bu)),
    );
    let (yu_g, v_g) = (
        _mm256_set1_epi32(pair(c.y, c.gu)),
        _mm256_set1_epi32(pair(c.gv, 0)),
    );
    let bias = [c.r_bias, c.g_bias, c.b_bias].map(|b| _mm256_set1_epi32(b));
    let masks = interleave_masks();
    for block in 0..blocks {
        let x = block * 16;
        // SAFETY: x + 16 <= the length of each line.
        let (yy, uu, vv) = unsafe {
            (
                _mm256_loadu_si256(y.as_ptr().add(x).cast()),
                _mm256_loadu_si256(u.as_ptr().add(x).cast()),
                _mm256_loadu_si256(v.as_ptr().add(x).cast()),
            )
        };
        let (yv_l, yv_h) = (_mm256_unpacklo_epi16(yy, vv), _mm256_unpackhi_epi16(yy, vv));
        let (yu_l, yu_h) = (_mm256_unpacklo_epi16(yy, uu), _mm256_unpackhi_epi16(yy, uu));
        let (v_l, v_h) = (
            _mm256_unpacklo_epi16(vv, zero),
            _mm256_unpackhi_epi16(vv, zero),
        );
        let red = narrow(
            _mm256_add_epi32(_mm256_madd_epi16(yv_l, yv_r), bias[0]),
            _mm256_add_epi32(_mm256_madd_epi16(yv_h, yv_r), bias[0]),
        );
        let green = narrow(
            _mm256_add_epi32(
                _mm256_add_epi32(_mm256_madd_epi16(yu_l, yu_g), _mm256_madd_epi16(v_l, v_g)),
                bias[1],
            ),
            _mm256_add_epi32(
                _mm256_add_epi32(_mm256_madd_epi16(yu_h, yu_g), _mm256_madd_epi16(v_h, v_g)),
                bias[1],
            ),
        );
        let blue = narrow(
            _mm256_add_epi32(_mm256_madd_epi16(yu_l, yu_b), bias[2]),
            _mm256_add_epi32(_mm256_madd_epi16(yu_h, yu_b), bias[2]),
        );
        for (part, mask) in masks.iter().enumerate() {
            let bytes = _mm_or_si128(
                _mm_or_si128(
                    _mm_shuffle_epi8(red, mask[0]),
                    _mm_shuffle_epi8(green, mask[1]),
                ),
                _mm_shuffle_epi8(blue, mask[2]),
            );
            // SAFETY: 3 * (x + 16) <= out.len(), and part < 3.
            unsafe { _mm_storeu_si128(out.as_mut_ptr().add(3 * x + 16 * part).cast(), bytes) };
        }
    }
    let done = blocks * 16;
    scalar::colour(&y[done..], &u[done..], &v[done..], c, &mut out[3 * done..]);
}

/// Shift, clamp to 0..255 and pack 16 sums (low and high halves of each 128-bit lane) to 16 bytes.
#[target_feature(enable = "avx2")]
fn narrow(low: __m256i, high: __m256i) -> __m128i {
    let low = _mm256_srai_epi32::<{ COLOUR_SHIFT as i32 }>(low);
    let high = _mm256_srai_epi32::<{ COLOUR_SHIFT as i32 }>(high);
    let words = _mm256_packs_epi32(low, high);
    let bytes = _mm256_packus_epi16(words, words);
    _mm_unpacklo_epi64(
        _mm256_castsi256_si128(bytes),
        _mm256_extracti128_si256::<1>(bytes),
    )
}

/// Shuffle masks that spread 16 bytes of one channel over 48 bytes of RGB; `[part][channel]`.
#[target_feature(enable = "avx2")]
fn interleave_masks() -> [[__m128i; 3]; 3] {
    std::array::from_fn(|part| {
        std::array::from_fn(|channel| {
            let at = |byte: usize| -> i8 {
                let position = part * 16 + byte;
                if position % 3 == channel {
                    (position / 3) as i8
                } else {
                    -1
                }
            };
            _mm_setr_epi8(
                at(0),
                at(1),
                at(2),
                at(3),
                at(4),
                at(5),
                at(6),
                at(7),
                at(8),
                at(9),
                at(10),
                at(11),
                at(12),
                at(13),
                at(14),
                at(15),
            )
        })
    })
}
