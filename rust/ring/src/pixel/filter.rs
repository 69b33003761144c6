//! Resampling weights: a triangle filter that widens with the scale, so that downscaling does not alias.
//!
//! Output sample `i` sits at `offset + (i + 0.5) * scale` in source samples. Every source sample whose centre lies
//! within `max(1, scale)` of it counts with weight `1 - distance / max(1, scale)`; weights are normalised over the
//! samples that exist. This is what image libraries call bilinear with antialiasing. Weights are 14-bit integers
//! that sum to exactly `1 << 14`.

/// Bits of a weight; the weights of one output sample sum to `1 << WEIGHT_BITS`.
pub const WEIGHT_BITS: u32 = 14;

/// Weights of one axis of one plane.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Filter {
    /// Taps per output sample, padded with zero weights to a multiple of 4 (or 8 above 4).
    pub taps: usize,
    /// First source sample of each output sample.
    pub starts: Vec<usize>,
    /// `taps` weights per output sample.
    pub weights: Vec<i16>,
    /// Taps that are really used, at most `taps`.
    pub used: usize,
}

impl Filter {
    /// Builds the weights for `outputs` samples taken from `[offset, offset + length)` of a line of `limit` samples.
    ///
    /// `offset` and `length` may be fractional (chroma of an odd crop).
    #[must_use]
    pub fn new(offset: f64, length: f64, limit: usize, outputs: usize) -> Self {
        let scale = length / outputs as f64;
        let support = scale.max(1.0);
        let low = (offset.floor() as usize).min(limit - 1);
        let high = ((offset + length).ceil() as usize).clamp(low + 1, limit);
        let rows: Vec<(usize, Vec<i16>)> = (0..outputs)
            .map(|i| row(offset + (i as f64 + 0.5) * scale, support, low, high))
            .collect();
        let used = rows.iter().map(|(_, w)| w.len()).max().unwrap_or(1);
        let taps = if used <= 4 { 4 } else { used.div_ceil(8) * 8 };
        let mut weights = vec![0_i16; taps * outputs];
        let mut starts = Vec::with_capacity(outputs);
        for (i, (start, row)) in rows.into_iter().enumerate() {
            weights[i * taps..i * taps + row.len()].copy_from_slice(&row);
            starts.push(start);
        }
        Self {
            taps,
            starts,
            weights,
            used,
        }
    }

    /// Weights of output sample `i`, without the padding.
    #[must_use]
    pub fn row(&self, i: usize) -> &[i16] {
        &self.weights[i * self.taps..i * self.taps + self.used]
    }
}

fn row(centre: f64, support: f64, low: usize, high: usize) -> (usize, Vec<i16>) {
    let first = ((centre - support - 0.5).ceil().max(low as f64) as usize).min(high - 1);
    let last = ((centre + support - 0.5).floor().max(low as f64) as usize).clamp(first, high - 1);
    let raw: Vec<f64> = (first..=last)
        .map(|j| (1.0 - (j as f64 + 0.5 - centre).abs() / support).max(0.0))
        .collect();
    let total: f64 = raw.iter().sum();
    if total <= 0.0 {
        return (first, vec![1 << WEIGHT_BITS]);
    }
    let one = f64::from(1 << WEIGHT_BITS);
    let mut fixed: Vec<i32> = raw
        .iter()
        .map(|w| (w / total * one).round() as i32)
        .collect();
    let rest = (1 << WEIGHT_BITS) - fixed.iter().sum::<i32>();
    let largest = (0..fixed.len()).max_by_key(|&i| fixed[i]).unwrap_or(0);
    fixed[largest] += rest;
    // Zero weights at either end would only cost time.
    let skip = fixed
        .iter()
        .take_while(|w| **w == 0)
        .count()
        .min(fixed.len() - 1);
    let keep = fixed.iter().rev().take_while(|w| **w == 0).count();
    let end = fixed.len().saturating_sub(keep).max(skip + 1);
    (
        first + skip,
        fixed[skip..end].iter().map(|w| *w as i16).collect(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn weights_sum_to_one_and_stay_inside(
            limit in 1_usize..700, outputs in 1_usize..500, a in 0.0_f64..1.0, b in 0.0_f64..1.0,
        ) {
            let offset = a * (limit as f64 - 0.5);
            let length = (b * (limit as f64 - offset)).max(0.5);
            let filter = Filter::new(offset, length, limit, outputs);
            for i in 0..outputs {
                let sum: i32 = filter.row(i).iter().map(|w| i32::from(*w)).sum();
                prop_assert_eq!(sum, 1 << WEIGHT_BITS);
                for (k, w) in filter.row(i).iter().enumerate() {
                    prop_assert!(*w == 0 || filter.starts[i] + k < limit);
                    prop_assert!(*w >= 0);
                }
            }
        }
    }

    #[test]
    fn same_size_is_the_identity() {
        let filter = Filter::new(0.0, 17.0, 17, 17);
        for i in 0..17 {
            assert_eq!((filter.starts[i], filter.row(i)[0]), (i, 1 << WEIGHT_BITS));
        }
    }
}
