//! Random programs over a heap: live blocks never overlap and the books balance, whatever is called in whatever order.
#![no_main]

use libfuzzer_sys::fuzz_target;
use loongforge_pool::device::{FakeDevice, SharedDevice};
use loongforge_pool::heap::{Heap, HeapConfig, Label};

fuzz_target!(|data: &[u8]| {
    let device = SharedDevice::new(FakeDevice::new(1 << 30, data.len() % 2 == 0));
    let config = HeapConfig {
        grow_bytes: 8 << 20,
        ..HeapConfig::default()
    };
    let mut heap = Heap::new(Box::new(device.clone()), config);
    let mut live: Vec<(u64, u64)> = Vec::new();
    for chunk in data.chunks_exact(4) {
        let (kind, a, b, c) = (
            chunk[0] % 12,
            u64::from(chunk[1]),
            u64::from(chunk[2]),
            u64::from(chunk[3]),
        );
        match kind {
            0..=4 => {
                let size = (a + 1) << (b % 17);
                if let Ok(address) =
                    heap.alloc(size, c % 3, Label::from_index((c / 3 % 4) as usize))
                {
                    assert!(
                        live.iter()
                            .all(|&(at, n)| address + size <= at || at + n <= address)
                    );
                    live.push((address, size));
                }
            }
            5 | 6 if !live.is_empty() => {
                let (address, _) = live.swap_remove(a as usize % live.len());
                heap.free(address).expect("live");
                assert!(heap.free(address).is_err());
            }
            7 if !live.is_empty() => {
                let _ = heap.record_stream(live[a as usize % live.len()].0, b % 3);
            }
            8 => drop(heap.begin_step(0)),
            9 => drop(heap.end_step(a % 4 > 0)),
            10 => {
                let time = device.get().work(a % 3);
                device.get().complete(a % 3, time);
            }
            11 => {
                heap.trim();
            }
            _ => heap.phase(["forward", "backward"][a as usize % 2]),
        }
        assert_eq!(
            heap.stats().requested.current,
            live.iter().map(|l| l.1).sum::<u64>()
        );
    }
});
