//! A fast checksum for cached pixels: finds damage and torn writes, not malice.

const PRIMES: [u64; 4] = [
    0x9e37_79b1_85eb_ca87,
    0xc2b2_ae3d_27d4_eb4f,
    0x1656_67b1_9e37_79f9,
    0x85eb_ca77_c2b2_ae63,
];

/// 64-bit checksum of the bytes; four lanes so that it runs at memory speed. Never 0.
#[must_use]
pub fn checksum(bytes: &[u8]) -> u64 {
    let mut lanes = PRIMES;
    let mut blocks = bytes.chunks_exact(32);
    for block in &mut blocks {
        for (lane, (word, prime)) in lanes.iter_mut().zip(block.chunks_exact(8).zip(PRIMES)) {
            let mut raw = [0; 8];
            raw.copy_from_slice(word);
            *lane = (*lane ^ u64::from_le_bytes(raw))
                .wrapping_mul(prime)
                .rotate_left(31);
        }
    }
    let mut sum = lanes.iter().fold(bytes.len() as u64, |sum, lane| {
        (sum ^ lane).wrapping_mul(PRIMES[0]).rotate_left(27)
    });
    for byte in blocks.remainder() {
        sum = (sum ^ u64::from(*byte))
            .wrapping_mul(PRIMES[1])
            .rotate_left(11);
    }
    (sum ^ (sum >> 33)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_changed_byte_changes_the_sum(
            mut bytes in prop::collection::vec(any::<u8>(), 1..300), at in any::<prop::sample::Index>(), flip in 1_u8..,
        ) {
            let before = checksum(&bytes);
            let index = at.index(bytes.len());
            bytes[index] ^= flip;
            prop_assert_ne!(before, checksum(&bytes));
        }
    }
}
