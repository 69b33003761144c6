//! Random programs for as long as wanted: `LOONGFORGE_FUZZ_SECONDS=300 cargo test --release --test long_random`.
//!
//! Same programs as the fuzz target, for toolchains without libFuzzer: bytes are drawn at random, and programs that did
//! not fail are kept and varied.

mod program;

use std::time::{Duration, Instant};

/// Xorshift: reproducible from its seed, which a failure prints.
struct Draw(u64);

impl Draw {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| (self.next() >> 24) as u8).collect()
    }
}

/// A variation: some bytes changed, a piece repeated (steps become alike, so plans are hit), or a piece cut out.
fn vary(draw: &mut Draw, parent: &[u8]) -> Vec<u8> {
    let mut child = parent.to_vec();
    for _ in 0..=draw.below(4) {
        let calls = child.len() / 4;
        if calls < 2 {
            return draw.bytes(257);
        }
        let from = 1 + 4 * draw.below(calls - 1);
        let to = (from + 4 * (1 + draw.below(64))).min(child.len());
        match draw.below(3) {
            0 => child[from] = (draw.next() >> 24) as u8,
            1 if child.len() < 8000 => {
                let piece = child[from..to].to_vec();
                child.extend(piece);
            }
            _ => drop(child.drain(from..to)),
        }
    }
    child
}

#[test]
fn no_program_breaks_a_promise() {
    let seconds = std::env::var("LOONGFORGE_FUZZ_SECONDS").map_or(Ok(2), |s| s.parse());
    let seconds = seconds.expect("LOONGFORGE_FUZZ_SECONDS is a whole number of seconds");
    let seed =
        std::env::var("LOONGFORGE_FUZZ_SEED").map_or(Ok(0x9e37_79b9_7f4a_7c15), |s| s.parse());
    let mut draw = Draw(
        seed.expect("LOONGFORGE_FUZZ_SEED is a positive whole number")
            .max(1),
    );
    let end = Instant::now() + Duration::from_secs(seconds);
    let mut kept: Vec<Vec<u8>> = Vec::new();
    while Instant::now() < end {
        let data = if kept.len() < 32 || draw.below(4) == 0 {
            let length = 1 + 4 * (1 + draw.below(700));
            draw.bytes(length)
        } else {
            let parent = draw.below(kept.len());
            vary(&mut draw, &kept[parent])
        };
        let outcome = std::panic::catch_unwind(|| program::run(&data));
        assert!(outcome.is_ok(), "this program breaks a promise: {data:?}");
        if kept.len() < 512 {
            kept.push(data);
        } else {
            let at = draw.below(kept.len());
            kept[at] = data;
        }
    }
}
