//! A hash map keyed by addresses: one multiplication instead of a keyed hash.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Multiplicative hash of one integer. Keys come from our own arithmetic, so no attacker picks them.
#[derive(Default, Clone, Copy)]
pub struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte) ^ self.0);
        }
    }

    fn write_u64(&mut self, value: u64) {
        // Fold the high half down: the map uses the top bits for its tags and the low bits for the bucket.
        let product = u128::from(value ^ 0x9e37_79b9_7f4a_7c15) * 0xd6e8_feb8_6659_fd93_u128;
        self.0 = (product as u64) ^ ((product >> 64) as u64);
    }

    fn write_u32(&mut self, value: u32) {
        self.write_u64(u64::from(value));
    }
}

/// Map from an address, offset or identifier.
pub type AddressMap<V> = HashMap<u64, V, BuildHasherDefault<AddressHasher>>;
