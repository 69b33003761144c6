//! A heap driven by bytes: live blocks never overlap and the books balance, whatever is called in whatever order. Used
//! by the fuzz target and by the long random test.

use loongforge_pool::device::{Device, FakeDevice, SharedDevice};
use loongforge_pool::heap::{Heap, HeapConfig, Label, PlanRule};

const BUDGET: u64 = 1 << 30;
/// The only stream that captures.
const CAPTURING: u64 = 2;

/// Run the program that `data` spells: one byte of set-up, then four bytes a call. Panics on a broken promise.
pub fn run(data: &[u8]) {
    let Some((&set_up, calls)) = data.split_first() else {
        return;
    };
    let mut machine = Machine::new(set_up);
    for call in calls.chunks_exact(4) {
        machine.call(call);
        machine.check();
    }
    machine.finish();
}

struct Machine {
    heap: Heap,
    device: SharedDevice,
    /// Address, size, stream.
    live: Vec<(u64, u64, u64)>,
    open: bool,
    capture: Option<u64>,
    captures: u64,
}

impl Machine {
    fn new(set_up: u8) -> Self {
        let fake = if set_up & 1 == 0 {
            FakeDevice::new(BUDGET, set_up & 2 == 0)
        } else {
            FakeDevice::committing(BUDGET)
        };
        let device = SharedDevice::new(fake);
        let config = HeapConfig {
            initial_bytes: if set_up & 5 > 0 { 128 << 20 } else { 0 },
            grow_bytes: 8 << 20,
            limit_bytes: if set_up & 8 == 0 { u64::MAX } else { 160 << 20 },
            ..HeapConfig::default()
        };
        let mut heap = Heap::new(Box::new(device.clone()), config);
        heap.set_plan_rule(match set_up >> 4 & 3 {
            0 => PlanRule::Above(0.03),
            1 => PlanRule::Never,
            _ => PlanRule::Always,
        });
        Self {
            heap,
            device,
            live: Vec::new(),
            open: false,
            capture: None,
            captures: 0,
        }
    }

    fn call(&mut self, call: &[u8]) {
        let (a, b, c) = (u64::from(call[1]), u64::from(call[2]), u64::from(call[3]));
        match call[0] % 18 {
            0..=5 => self.alloc((a + 1) << (b % 17), c % 3, (c / 3 % 4) as usize),
            6..=8 if !self.live.is_empty() => {
                let (address, ..) = self.live.swap_remove(a as usize % self.live.len());
                self.heap.free(address).expect("live");
                assert!(self.heap.free(address).is_err(), "a second free is refused");
            }
            9 if !self.live.is_empty() => {
                let (address, ..) = self.live[a as usize % self.live.len()];
                self.heap.record_stream(address, b % 3).expect("live");
                assert!(
                    self.heap
                        .relabel(address, Label::from_index(c as usize % 3))
                );
            }
            10 => {
                assert_eq!(self.heap.begin_step(a % 2).is_ok(), !self.open);
                self.open = true;
            }
            11 => {
                assert_eq!(self.heap.end_step(a % 4 > 0).is_ok(), self.open);
                self.open = false;
            }
            12 => {
                let time = self.device.get().work(a % 3);
                self.device.get().complete(a % 3, time);
            }
            13 => {
                self.heap.trim();
            }
            14 => self.capture(a % 3),
            15 => self.end_capture(a % 2 == 0),
            16 => {
                if self.capture != Some(a % 3) {
                    let _ = self.heap.release_pool((a % 3, 0));
                }
            }
            17 if a == 0 => drop(self.heap.forget_plan()),
            _ => self.heap.phase(["forward", "backward"][a as usize % 2]),
        }
    }

    fn alloc(&mut self, size: u64, stream: u64, label: usize) {
        let Ok(address) = self.heap.alloc(size, stream, Label::from_index(label)) else {
            return;
        };
        let apart = |&(at, n, _): &(u64, u64, u64)| address + size <= at || at + n <= address;
        assert!(self.live.iter().all(apart), "live blocks overlap");
        assert_eq!(address % 512, 0, "torch is promised 512-byte alignment");
        self.live.push((address, size, stream));
    }

    fn capture(&mut self, id: u64) {
        if self.capture.is_none() {
            self.heap
                .begin_capture((id, 0))
                .expect("no capture is open");
            self.captures += 1;
            let serial = Some(self.captures);
            self.device.get().set_capture(CAPTURING, serial);
            self.capture = Some(id);
        }
    }

    fn end_capture(&mut self, tell: bool) {
        if let Some(id) = self.capture.take() {
            self.device.get().set_capture(CAPTURING, None);
            if tell {
                let _ = self.heap.end_capture((id, 0));
            }
        }
    }

    fn check(&mut self) {
        let stats = self.heap.stats();
        let live: u64 = self.live.iter().map(|l| l.1).sum();
        assert_eq!(stats.requested.current, live, "requested bytes");
        assert_eq!(
            stats.requests.current,
            self.live.len() as u64,
            "live blocks"
        );
        assert_eq!(
            stats.labels.iter().map(|g| g.current).sum::<u64>(),
            live,
            "labels add up"
        );
        assert!(stats.granted.current >= live);
        assert!(stats.reserved.current <= BUDGET);
        for &(address, size, _) in &self.live {
            assert_eq!(self.heap.size_of(address), Some(size));
        }
    }

    /// Free all: everything must come back, once the device is done.
    fn finish(&mut self) {
        self.end_capture(true);
        if self.open {
            self.heap.end_step(false).expect("open");
        }
        for (address, ..) in std::mem::take(&mut self.live) {
            self.heap.free(address).expect("live");
        }
        let _ = self.device.get().synchronize();
        for id in 0..3 {
            while self.heap.release_pool((id, 0)).is_ok() {}
        }
        self.heap.forget_plan().expect("closed");
        self.heap.trim();
        let stats = self.heap.stats();
        assert_eq!(stats.requested.current, 0);
        assert_eq!(stats.granted.current, 0);
        assert_eq!(stats.graph_bytes, 0, "graph memory came back");
        assert_eq!(stats.waiting, 0, "no block waits for ever");
    }
}
