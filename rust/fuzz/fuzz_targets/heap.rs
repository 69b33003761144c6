//! Random programs over a heap, guided by coverage; what is promised is in `program`.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../pool/tests/program/mod.rs"]
mod program;

fuzz_target!(|data: &[u8]| program::run(data));
