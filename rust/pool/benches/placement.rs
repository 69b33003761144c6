//! Time of allocation and free under every policy, of a planned hit, of the whole heap, and of planning.

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use loongforge_pool::arena::{Placement, RunFit};
use loongforge_pool::buddy::PureBuddy;
use loongforge_pool::caching::{CachingSim, ExpandableSim};
use loongforge_pool::device::FakeDevice;
use loongforge_pool::heap::{Heap, HeapConfig, Label};
use loongforge_pool::planner::plan;
use loongforge_pool::replay::Replay;
use loongforge_pool::trace::Item;

/// A step that looks like training: long lives in forward, short temporaries, everything gone at the end.
fn step(count: u32) -> Vec<Item> {
    (0..count)
        .map(|i| {
            let size = (u64::from(i).wrapping_mul(2_654_435_761) % 71 + 1) * 262_144;
            let life = if i % 3 == 0 { count - i } else { i % 7 + 1 };
            Item {
                size,
                end: (i + life).min(count),
            }
        })
        .collect()
}

fn frees(items: &[Item]) -> Vec<Vec<u32>> {
    let mut out = vec![Vec::new(); items.len() + 1];
    for (index, item) in items.iter().enumerate() {
        out[item.end as usize].push(index as u32);
    }
    out
}

fn run(placement: &mut dyn Placement, items: &[Item], frees: &[Vec<u32>]) {
    let mut offsets = vec![0; items.len()];
    for index in 0..=items.len() {
        for &gone in &frees[index] {
            placement.free(offsets[gone as usize]).expect("live");
        }
        if let Some(item) = items.get(index) {
            offsets[index] = placement.alloc(item.size).expect("room");
        }
    }
}

fn policies(c: &mut Criterion) {
    let items = step(3000);
    let frees = frees(&items);
    let mut group = c.benchmark_group("step of 3000 allocations");
    group.bench_function("run fit", |b| {
        let mut pool = RunFit::unlimited();
        b.iter(|| run(&mut pool, &items, &frees));
    });
    group.bench_function("pure buddy", |b| {
        let mut pool = PureBuddy::new(9, 42);
        b.iter(|| run(&mut pool, &items, &frees));
    });
    group.bench_function("segment caching model", |b| {
        let mut pool = CachingSim::default();
        b.iter(|| run(&mut pool, &items, &frees));
    });
    group.bench_function("expandable segments model", |b| {
        let mut pool = ExpandableSim::default();
        b.iter(|| run(&mut pool, &items, &frees));
    });
    group.bench_function("planned hits", |b| {
        let mut replay = Replay::new(plan(&items).expect("plan")).expect("plan");
        b.iter(|| {
            replay.begin();
            for (index, gone_now) in frees.iter().enumerate() {
                for &gone in gone_now {
                    replay.give(gone);
                }
                if let Some(item) = items.get(index) {
                    let _ = replay.take(item.size);
                }
            }
        });
    });
    group.bench_function("whole heap, planned", |b| {
        let config = HeapConfig {
            initial_bytes: 1 << 38,
            ..HeapConfig::default()
        };
        let mut heap = Heap::new(Box::new(FakeDevice::new(1 << 40, false)), config);
        b.iter(|| {
            heap.begin_step(0).expect("closed");
            let mut addresses = vec![0; items.len()];
            for index in 0..=items.len() {
                for &gone in &frees[index] {
                    heap.free(addresses[gone as usize]).expect("live");
                }
                if let Some(item) = items.get(index) {
                    addresses[index] = heap.alloc(item.size, 0, Label::Ephemeral).expect("room");
                }
            }
            heap.end_step(true).expect("open")
        });
    });
    group.finish();
}

fn planning(c: &mut Criterion) {
    let mut group = c.benchmark_group("planning");
    group.sample_size(10);
    for count in [1000, 5000, 10_000] {
        let items = step(count);
        group.bench_function(format!("{count} allocations"), |b| {
            b.iter_batched(
                || items.clone(),
                |items| plan(&items).expect("plan"),
                BatchSize::LargeInput,
            );
        });
    }
    group.finish();
}

criterion_group!(benches, policies, planning);
criterion_main!(benches);
