//! Counters and the three numbers of fragmentation.

/// Fractions that describe waste. All are in 0..=1; always report the three together.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Waste {
    /// `1 - requested / granted` of the blocks live at the peak: rounding.
    pub internal: f64,
    /// `1 - peak requested / high water`: what the device must hold beyond what was asked for.
    pub reserve: f64,
    /// `1 - largest free run / free bytes`: how scattered free memory is; may be high in mid-step without harm.
    pub external: f64,
}

/// `1 - part / whole`, 0 for an empty whole.
pub fn waste(part: u64, whole: u64) -> f64 {
    if whole == 0 {
        0.0
    } else {
        1.0 - part as f64 / whole as f64
    }
}

/// Durations in logarithmic buckets: four per doubling, from 1 ns to 18 s.
#[derive(Debug, Clone)]
pub struct Histogram {
    buckets: Vec<u64>,
    count: u64,
    total_ns: u64,
    max_ns: u64,
}

const SUB: u32 = 2;
const BUCKETS: usize = 34 << SUB;

impl Default for Histogram {
    fn default() -> Self {
        Self {
            buckets: vec![0; BUCKETS],
            count: 0,
            total_ns: 0,
            max_ns: 0,
        }
    }
}

fn bucket_of(ns: u64) -> usize {
    if ns < 1 << SUB {
        return ns as usize;
    }
    let log = ns.ilog2();
    let sub = (ns >> (log - SUB)) & ((1 << SUB) - 1);
    ((((log - SUB + 1) as usize) << SUB) + sub as usize).min(BUCKETS - 1)
}

fn upper_edge(bucket: usize) -> u64 {
    if bucket < 1 << SUB {
        return bucket as u64;
    }
    let log = (bucket >> SUB) as u32 + SUB - 1;
    let sub = (bucket & ((1 << SUB) - 1)) as u64;
    (1 << log) + ((sub + 1) << (log - SUB)) - 1
}

impl Histogram {
    /// Add one duration.
    pub fn add(&mut self, ns: u64) {
        self.buckets[bucket_of(ns)] += 1;
        self.count += 1;
        self.total_ns += ns;
        self.max_ns = self.max_ns.max(ns);
    }

    /// Number of durations.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Sum in nanoseconds.
    pub fn total_ns(&self) -> u64 {
        self.total_ns
    }

    /// Longest in nanoseconds.
    pub fn max_ns(&self) -> u64 {
        self.max_ns
    }

    /// Upper edge of the bucket that holds quantile `q` (at most 25 per cent above the value), in nanoseconds.
    pub fn quantile(&self, q: f64) -> u64 {
        let wanted = (q * self.count as f64).ceil().max(1.0) as u64;
        let mut seen = 0;
        for (bucket, &n) in self.buckets.iter().enumerate() {
            seen += n;
            if seen >= wanted {
                return upper_edge(bucket).min(self.max_ns);
            }
        }
        self.max_ns
    }

    /// Fraction of durations of at most `ns` (whole buckets only, so never too high).
    pub fn fraction_within(&self, ns: u64) -> f64 {
        if self.count == 0 {
            return 1.0;
        }
        let within: u64 = self
            .buckets
            .iter()
            .enumerate()
            .take_while(|&(b, _)| upper_edge(b) <= ns)
            .map(|(_, n)| n)
            .sum();
        within as f64 / self.count as f64
    }
}

/// A count with its peak and running totals, in the shape torch reports.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Gauge {
    /// Current value.
    pub current: u64,
    /// Highest value since the last reset.
    pub peak: u64,
    /// Sum of all increases.
    pub allocated: u64,
    /// Sum of all decreases.
    pub freed: u64,
}

impl Gauge {
    /// Increase.
    pub fn add(&mut self, by: u64) {
        self.current += by;
        self.allocated += by;
        self.peak = self.peak.max(self.current);
    }

    /// Decrease.
    pub fn sub(&mut self, by: u64) {
        self.current -= by;
        self.freed += by;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_duration_lies_below_the_edge_of_its_bucket() {
        for ns in (0..4000).chain([1 << 20, (1 << 33) + 5]) {
            let bucket = bucket_of(ns);
            assert!(
                upper_edge(bucket) >= ns && (bucket == 0 || upper_edge(bucket - 1) < ns),
                "{ns}"
            );
        }
    }

    #[test]
    fn quantiles_are_within_a_quarter() {
        let mut h = Histogram::default();
        (1..=1000).for_each(|ns| h.add(ns));
        let p99 = h.quantile(0.99);
        assert!((990..=1000).contains(&p99), "{p99}");
        assert!(h.fraction_within(10_000) > 0.999);
    }
}
