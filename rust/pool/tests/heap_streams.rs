//! The heap under random programs on a device with logical time: memory is handed out only when every earlier use of it
//! is ordered before the new owner's work.

use loongforge_pool::device::{Device, FakeDevice, SharedDevice};
use loongforge_pool::heap::{Heap, HeapConfig, Label};
use proptest::prelude::*;

const MIB: u64 = 1 << 20;
/// Piece in which the committing device commits.
const PAGE: u64 = 32 << 20;

#[derive(Debug, Clone)]
enum Op {
    Alloc { stream: u64, size: u64, label: u8 },
    Use { pick: usize },
    UseElsewhere { pick: usize, stream: u64 },
    Free { pick: usize },
    Complete { stream: u64 },
    BeginStep,
    EndStep,
    Phase(u8),
    Trim,
    Capture { id: u64 },
    EndCapture { tell: bool },
    Release { id: u64 },
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let size = prop_oneof![1_u64..4096, 4096_u64..600_000, 600_000_u64..(9 * MIB)];
    let op = prop_oneof![
        14 => (0_u64..3, size, 0_u8..8).prop_map(|(stream, size, label)| Op::Alloc { stream, size, label }),
        6 => any::<usize>().prop_map(|pick| Op::Use { pick }),
        5 => (any::<usize>(), 0_u64..3).prop_map(|(pick, stream)| Op::UseElsewhere { pick, stream }),
        12 => any::<usize>().prop_map(|pick| Op::Free { pick }),
        3 => (0_u64..3).prop_map(|stream| Op::Complete { stream }),
        2 => Just(Op::BeginStep),
        2 => Just(Op::EndStep),
        1 => (0_u8..3).prop_map(Op::Phase),
        1 => Just(Op::Trim),
        1 => (1_u64..4).prop_map(|id| Op::Capture { id }),
        2 => any::<bool>().prop_map(|tell| Op::EndCapture { tell }),
        1 => (1_u64..4).prop_map(|id| Op::Release { id }),
    ];
    prop::collection::vec(op, 1..260)
}

#[derive(Debug, Clone)]
struct Live {
    address: u64,
    size: u64,
    stream: u64,
    graph: Option<u64>,
}

/// The program and what it knows about past uses of every byte range.
struct Model {
    heap: Heap,
    device: SharedDevice,
    live: Vec<Live>,
    /// Past uses: (start, end, stream, time).
    uses: Vec<(u64, u64, u64, u64)>,
    /// Ranges that belong to a graph pool: (start, end, pool).
    graph_ranges: Vec<(u64, u64, u64)>,
    open: bool,
    capture: Option<u64>,
    captured: u64,
}

const CAPTURE_STREAM: u64 = 2;

impl Model {
    fn new(fake: FakeDevice, config: HeapConfig) -> Self {
        let device = SharedDevice::new(fake);
        Self {
            heap: Heap::new(Box::new(device.clone()), config),
            device,
            live: Vec::new(),
            uses: Vec::new(),
            graph_ranges: Vec::new(),
            open: false,
            capture: None,
            captured: 0,
        }
    }

    fn run(&mut self, op: &Op) -> Result<(), TestCaseError> {
        match *op {
            Op::Alloc {
                stream,
                size,
                label,
            } => self.alloc(stream, size, label)?,
            Op::Use { pick } => {
                if let Some(block) = self.pick(pick) {
                    self.touch(&block, block.stream);
                }
            }
            Op::UseElsewhere { pick, stream } => self.use_elsewhere(pick, stream)?,
            Op::Free { pick } => {
                if !self.live.is_empty() {
                    let at = pick % self.live.len();
                    let block = self.live.swap_remove(at);
                    prop_assert!(self.heap.free(block.address).is_ok());
                    prop_assert!(
                        self.heap.free(block.address).is_err(),
                        "a second free is refused"
                    );
                }
            }
            Op::Complete { stream } => {
                let mut device = self.device.get();
                let time = device.work(stream);
                device.complete(stream, time);
            }
            Op::BeginStep => {
                prop_assert_eq!(self.heap.begin_step(0).is_ok(), !self.open);
                self.open = true;
            }
            Op::EndStep => {
                prop_assert_eq!(self.heap.end_step(true).is_ok(), self.open);
                self.open = false;
            }
            Op::Phase(n) => self
                .heap
                .phase(["forward", "backward", "optimizer"][n as usize]),
            Op::Trim => {
                self.heap.trim();
            }
            Op::Capture { id } => {
                if self.capture.is_none() {
                    self.heap.begin_capture((id, 0)).unwrap();
                    self.captured += 1;
                    self.device
                        .get()
                        .set_capture(CAPTURE_STREAM, Some(self.captured));
                    self.capture = Some(id);
                }
            }
            Op::EndCapture { tell } => {
                if let Some(id) = self.capture.take() {
                    self.device.get().set_capture(CAPTURE_STREAM, None);
                    if tell {
                        let _ = self.heap.end_capture((id, 0));
                    } else {
                        // A failed capture: its memory may come back once nothing of it is live.
                        self.graph_ranges.retain(|r| r.2 != id);
                    }
                }
            }
            Op::Release { id } => {
                if self.capture != Some(id) {
                    self.graph_ranges.retain(|r| r.2 != id);
                    while self.heap.release_pool((id, 0)).is_ok() {}
                }
            }
        }
        Ok(())
    }

    fn alloc(&mut self, stream: u64, size: u64, label: u8) -> Result<(), TestCaseError> {
        let label = Label::from_index(if label < 6 { 0 } else { usize::from(label) - 5 });
        let Ok(address) = self.heap.alloc(size, stream, label) else {
            return Ok(());
        };
        let end = address + size;
        for other in &self.live {
            prop_assert!(
                end <= other.address || other.address + other.size <= address,
                "overlap of live blocks"
            );
        }
        let graph = self.capture.filter(|_| stream == CAPTURE_STREAM);
        for &(from, to, pool) in &self.graph_ranges {
            let apart = end <= from || to <= address;
            prop_assert!(
                apart || graph == Some(pool),
                "memory of graph pool {} was given out",
                pool
            );
        }
        if let Some(pool) = graph {
            self.graph_ranges.push((address, end, pool));
        } else {
            let device = self.device.get();
            for &(from, to, user, time) in &self.uses {
                let apart = end <= from || to <= address;
                prop_assert!(
                    apart || device.ordered(user, time, stream),
                    "stream {} got memory that stream {} may still use",
                    stream,
                    user
                );
            }
        }
        let block = Live {
            address,
            size,
            stream,
            graph,
        };
        if graph.is_none() {
            self.touch(&block, stream);
        }
        self.live.push(block);
        Ok(())
    }

    fn pick(&self, pick: usize) -> Option<Live> {
        let eager: Vec<&Live> = self.live.iter().filter(|b| b.graph.is_none()).collect();
        (!eager.is_empty()).then(|| eager[pick % eager.len()].clone())
    }

    fn touch(&mut self, block: &Live, stream: u64) {
        let time = self.device.get().work(stream);
        self.uses
            .push((block.address, block.address + block.size, stream, time));
    }

    /// A correct program: the other stream waits for the block's stream, works, and says so.
    fn use_elsewhere(&mut self, pick: usize, stream: u64) -> Result<(), TestCaseError> {
        if self.capture.is_some() {
            return Ok(());
        }
        let Some(block) = self.pick(pick) else {
            return Ok(());
        };
        {
            let mut device = self.device.get();
            let event = device.record(block.stream).unwrap();
            device.wait(stream, event).unwrap();
        }
        self.touch(&block, stream);
        prop_assert!(self.heap.record_stream(block.address, stream).is_ok());
        Ok(())
    }
}

fn check(budget: u64, config: HeapConfig, program: &[Op]) -> Result<(), TestCaseError> {
    run(
        Model::new(FakeDevice::new(budget, false), config),
        budget,
        program,
    )
}

fn run(mut model: Model, budget: u64, program: &[Op]) -> Result<(), TestCaseError> {
    for op in program {
        model.run(op)?;
        let stats = model.heap.stats();
        let wanted: u64 = model.live.iter().map(|b| b.size).sum();
        prop_assert_eq!(stats.requested.current, wanted);
        prop_assert!(stats.reserved.current <= budget);
        let device = model.device.get();
        if device.commits() {
            for block in &model.live {
                let base = device.base();
                let first = (block.address - base) / PAGE;
                let last = (block.address + block.size - 1 - base) / PAGE;
                for page in first..=last {
                    prop_assert!(
                        device.committed.contains(&(base + page * PAGE)),
                        "a live block lost its memory"
                    );
                }
            }
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn growing_heaps_never_hand_out_memory_in_use(program in ops()) {
        let config = HeapConfig { grow_bytes: 16 * MIB, ..HeapConfig::default() };
        check(1 << 40, config, &program)?;
    }

    #[test]
    fn committing_heaps_never_take_memory_from_live_blocks(program in ops()) {
        let config = HeapConfig { initial_bytes: 1 << 30, grow_bytes: 0, ..HeapConfig::default() };
        run(Model::new(FakeDevice::committing(5 * PAGE), config), 5 * PAGE, &program)?;
    }

    #[test]
    fn tight_heaps_never_hand_out_memory_in_use(program in ops()) {
        let config = HeapConfig { initial_bytes: 48 * MIB, grow_bytes: 8 * MIB, ..HeapConfig::default() };
        check(64 * MIB, config, &program)?;
    }
}
