//! Cost of one recorded step, without Python: `step_cost TRACE.json plan|run_fit|placement STEPS`.
//!
//! Prints nanoseconds per allocation with its free, after one step that is recorded and one more. For instructions and
//! cache misses: `valgrind --tool=callgrind --cache-sim=yes --branch-sim=yes --toggle-collect='*measured_steps*'`.
//! `placement` is run fit without the heap around it.

use std::collections::HashMap;
use std::io::Write;
use std::time::Instant;

use loongforge_pool::arena::{Placement, RunFit};
use loongforge_pool::device::FakeDevice;
use loongforge_pool::heap::{Heap, HeapConfig, Label, PlanRule};

/// Allocation of a block by its number and size, or its free.
enum Call {
    Alloc(usize, u64),
    Free(usize),
}

/// The events `["a", id, size, ...]` and `["f", id, ...]` of a trace, blocks that stay left out.
fn read(text: &str) -> (Vec<Call>, usize) {
    let events = text.split_once("\"events\"").expect("a trace has events").1;
    let mut numbers = HashMap::new();
    let mut calls = Vec::new();
    let mut sizes: Vec<(usize, bool)> = Vec::new();
    for event in events.split('[').skip(2) {
        let fields: Vec<&str> = event.split([',', ']']).map(str::trim).collect();
        match fields[0] {
            "\"a\"" => {
                let number = sizes.len();
                numbers.insert(fields[1].to_owned(), number);
                calls.push(Call::Alloc(number, fields[2].parse().expect("a size")));
                sizes.push((calls.len() - 1, true));
            }
            "\"f\"" => {
                let number = numbers[fields[1]];
                sizes[number].1 = false;
                calls.push(Call::Free(number));
            }
            other => panic!("event {other} is neither \"a\" nor \"f\""),
        }
    }
    let stays = |number: &usize| sizes[*number].1;
    calls.retain(|call| !matches!(call, Call::Alloc(number, _) if stays(number)));
    (calls, sizes.len())
}

/// One step through the heap.
fn heap_step(heap: &mut Heap, calls: &[Call], addresses: &mut [u64]) {
    heap.begin_step(0).expect("closed");
    for call in calls {
        match *call {
            Call::Alloc(number, size) => {
                addresses[number] = heap.alloc(size, 0, Label::Ephemeral).expect("room");
            }
            Call::Free(number) => heap.free(addresses[number]).expect("live"),
        }
    }
    heap.end_step(true).expect("open");
}

/// One step through the placement alone.
fn placement_step(pool: &mut RunFit, calls: &[Call], addresses: &mut [u64]) {
    for call in calls {
        match *call {
            Call::Alloc(number, size) => addresses[number] = pool.alloc(size).expect("room"),
            Call::Free(number) => pool.free(addresses[number]).expect("live"),
        }
    }
}

/// The steps that count; a function of its own, so that a profiler can be switched on with it.
#[inline(never)]
fn measured_steps(steps: u32, step: &mut dyn FnMut()) {
    for _ in 0..steps {
        step();
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, trace, what, steps] = arguments.as_slice() else {
        panic!("usage: step_cost TRACE.json plan|run_fit|placement STEPS");
    };
    let steps: u32 = steps.parse().expect("a number of steps");
    let (calls, blocks) = read(&std::fs::read_to_string(trace).expect("a readable trace"));
    let mut addresses = vec![0_u64; blocks];
    let mut pool = RunFit::unlimited();
    let config = HeapConfig {
        initial_bytes: 1 << 36,
        ..HeapConfig::default()
    };
    let mut heap = Heap::new(Box::new(FakeDevice::new(1 << 40, false)), config);
    heap.set_plan_rule(if what == "plan" {
        PlanRule::Always
    } else {
        PlanRule::Above(0.9)
    });
    let mut step: Box<dyn FnMut()> = if what == "placement" {
        Box::new(|| placement_step(&mut pool, &calls, &mut addresses))
    } else {
        Box::new(|| heap_step(&mut heap, &calls, &mut addresses))
    };
    step();
    step();
    let start = Instant::now();
    measured_steps(steps, &mut step);
    let pairs = f64::from(steps) * calls.len() as f64 / 2.0;
    let each = start.elapsed().as_nanos() as f64 / pairs;
    writeln!(
        std::io::stdout(),
        "{what}: {each:.1} ns per allocation and free"
    )
    .expect("standard output");
}
