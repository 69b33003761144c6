//! AVX2 kernels; bit for bit what `scalar` computes.

use std::arch::x86_64::{
    __m256i, _mm_cvtsi32_si128, _mm_loadl_epi64, _mm_loadu_si128, _mm_storeu_si128,
    _mm_unpacklo_epi64, _mm256_add_epi16, _mm256_add_epi32, _mm256_broadcastsi128_si256,
    _mm256_castsi256_si128, _mm256_cvtepu8_epi16, _mm256_extracti128_si256, _mm256_hadd_epi32,
    _mm256_loadu_si256, _mm256_madd_epi16, _mm256_mulhrs_epi16, _mm256_or_si256,
    _mm256_packs_epi32, _mm256_packus_epi16, _mm256_permute4x64_epi64, _mm256_set_m128i,
    _mm256_set1_epi16, _mm256_set1_epi32, _mm256_setzero_si256, _mm256_shuffle_epi8,
    _mm256_slli_epi16, _mm256_sra_epi32, _mm256_srai_epi16, _mm256_srai_epi32, _mm256_storeu_si256,
    _mm256_sub_epi16, _mm256_unpackhi_epi16, _mm256_unpacklo_epi16,
};

use super::colour::{COLOUR_SHIFT, Coefficients, NEUTRAL, SAMPLE_BITS};
use super::filter::{Filter, WEIGHT_BITS};
use super::line::Rows;
use super::scalar;

/// Most rows that one output row is made of in the vector kernel; more go through the scalar one.
const MAX_ROWS: usize = 64;

fn pair(a: i16, b: i16) -> i32 {
    (i32::from(b) << 16) | (i32::from(a) & 0xffff)
}

/// See [`scalar::vertical`]; depth up to 15.
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
    let bits = WEIGHT_BITS + rows.depth - SAMPLE_BITS;
    let shift = _mm_cvtsi32_si128(bits as i32);
    let round = _mm256_set1_epi32(1 << (bits - 1));
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

/// Pixels that the colour kernels make at once.
pub const BLOCK: usize = 32;

/// See [`scalar::colour`].
///
/// # Safety
/// The processor has AVX2.
#[target_feature(enable = "avx2")]
pub unsafe fn colour(y: &[i16], u: &[i16], v: &[i16], c: &Coefficients, out: &mut [u8]) {
    let blocks = (out.len() / 3).min(y.len()).min(u.len()).min(v.len()) / BLOCK;
    // SAFETY: AVX2 is there; all lines and the output hold `blocks` blocks.
    unsafe { colour_blocks::<false>(y.as_ptr().cast(), u, v, c, blocks, out) };
    let done = blocks * BLOCK;
    scalar::colour(&y[done..], &u[done..], &v[done..], c, &mut out[3 * done..]);
}

/// As [`colour`], with luma as 8-bit samples; only whole blocks of [`BLOCK`] pixels.
///
/// # Safety
/// The processor has AVX2.
#[target_feature(enable = "avx2")]
pub unsafe fn colour_of_bytes(y: &[u8], u: &[i16], v: &[i16], c: &Coefficients, out: &mut [u8]) {
    let blocks = (out.len() / 3).min(y.len()).min(u.len()).min(v.len()) / BLOCK;
    // SAFETY: AVX2 is there; all lines and the output hold `blocks` blocks.
    unsafe { colour_blocks::<true>(y.as_ptr(), u, v, c, blocks, out) };
}

/// Colour of `blocks` times [`BLOCK`] pixels; luma is u8 with `BYTES`, else i16.
///
/// # Safety
/// AVX2; `y`, `u`, `v` and `out` hold that many pixels.
#[target_feature(enable = "avx2")]
#[allow(clippy::many_single_char_names)]
unsafe fn colour_blocks<const BYTES: bool>(
    y: *const u8,
    u: &[i16],
    v: &[i16],
    c: &Coefficients,
    blocks: usize,
    out: &mut [u8],
) {
    let set = |value: i16| _mm256_set1_epi16(value);
    let (cy, rv, gu, gv, bu) = (set(c.y), set(c.rv), set(c.gu), set(c.gv), set(c.bu));
    let (bias, neutral) = (set(c.bias), set(NEUTRAL));
    let masks = interleave_masks();
    for block in 0..blocks {
        let half = |part: usize| -> (__m256i, __m256i, __m256i) {
            let x = block * BLOCK + part * 16;
            // SAFETY: x + 16 pixels exist in every line.
            let (yy, uu, vv) = unsafe {
                (
                    if BYTES {
                        let wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(y.add(x).cast()));
                        _mm256_slli_epi16::<{ SAMPLE_BITS as i32 - 8 }>(wide)
                    } else {
                        _mm256_loadu_si256(y.add(2 * x).cast())
                    },
                    _mm256_loadu_si256(u.as_ptr().add(x).cast()),
                    _mm256_loadu_si256(v.as_ptr().add(x).cast()),
                )
            };
            let (uu, vv) = (_mm256_sub_epi16(uu, neutral), _mm256_sub_epi16(vv, neutral));
            let luma = _mm256_add_epi16(_mm256_mulhrs_epi16(yy, cy), bias);
            let green = _mm256_add_epi16(_mm256_mulhrs_epi16(uu, gu), _mm256_mulhrs_epi16(vv, gv));
            let red = _mm256_add_epi16(luma, _mm256_mulhrs_epi16(vv, rv));
            let green = _mm256_add_epi16(luma, green);
            let blue = _mm256_add_epi16(luma, _mm256_mulhrs_epi16(uu, bu));
            (
                _mm256_srai_epi16::<{ COLOUR_SHIFT as i32 }>(red),
                _mm256_srai_epi16::<{ COLOUR_SHIFT as i32 }>(green),
                _mm256_srai_epi16::<{ COLOUR_SHIFT as i32 }>(blue),
            )
        };
        let (low, high) = (half(0), half(1));
        let join = |a: __m256i, b: __m256i| {
            _mm256_permute4x64_epi64::<0b1101_1000>(_mm256_packus_epi16(a, b))
        };
        let (red, green, blue) = (
            join(low.0, high.0),
            join(low.1, high.1),
            join(low.2, high.2),
        );
        for (part, mask) in masks.iter().enumerate() {
            let bytes = _mm256_or_si256(
                _mm256_or_si256(
                    _mm256_shuffle_epi8(red, mask[0]),
                    _mm256_shuffle_epi8(green, mask[1]),
                ),
                _mm256_shuffle_epi8(blue, mask[2]),
            );
            // SAFETY: 3 * (block + 1) * BLOCK <= out.len(), and part < 3.
            unsafe {
                let at = out.as_mut_ptr().add(3 * block * BLOCK + 16 * part);
                _mm_storeu_si128(at.cast(), _mm256_castsi256_si128(bytes));
                _mm_storeu_si128(at.add(48).cast(), _mm256_extracti128_si256::<1>(bytes));
            }
        }
    }
}

/// Writes every 8-bit sample twice, as 15-bit samples: chroma of half the width.
///
/// # Safety
/// The processor has AVX2.
#[target_feature(enable = "avx2")]
pub unsafe fn expand_pairs(source: &[u8], out: &mut [i16]) {
    const UP: i32 = SAMPLE_BITS as i32 - 8;
    let blocks = (out.len() / 32).min(source.len() / 16);
    for block in 0..blocks {
        // SAFETY: 16 source bytes and 32 outputs exist for each block.
        unsafe {
            let wide =
                _mm256_cvtepu8_epi16(_mm_loadu_si128(source.as_ptr().add(16 * block).cast()));
            let wide = _mm256_permute4x64_epi64::<0b1101_1000>(_mm256_slli_epi16::<UP>(wide));
            let at = out.as_mut_ptr().add(32 * block);
            _mm256_storeu_si256(at.cast(), _mm256_unpacklo_epi16(wide, wide));
            _mm256_storeu_si256(at.add(16).cast(), _mm256_unpackhi_epi16(wide, wide));
        }
    }
    for (i, value) in out.iter_mut().enumerate().skip(32 * blocks) {
        *value = i16::from(source[(i / 2).min(source.len() - 1)]) << UP;
    }
}

/// Shuffle masks that spread 16 bytes of one channel over 48 bytes of RGB, in both halves; `[part][channel]`.
#[target_feature(enable = "avx2")]
fn interleave_masks() -> [[__m256i; 3]; 3] {
    std::array::from_fn(|part| {
        std::array::from_fn(|channel| {
            let bytes: [i8; 16] = std::array::from_fn(|byte| {
                let position = part * 16 + byte;
                if position % 3 == channel {
                    (position / 3) as i8
                } else {
                    -1
                }
            });
            // SAFETY: 16 readable bytes.
            _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) })
        })
    })
}
