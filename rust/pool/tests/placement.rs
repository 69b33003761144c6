//! Invariants of every placement policy: no overlap, conservation, full coalescing, determinism.

use std::collections::BTreeMap;

use loongforge_pool::arena::{Placement, RunFit};
use loongforge_pool::buddy::PureBuddy;
use loongforge_pool::caching::{CachingSim, ExpandableSim};
use loongforge_pool::planner::{UNPLANNED, merge, plan, verify};
use loongforge_pool::replay::Replay;
use loongforge_pool::runs::RunIndex;
use loongforge_pool::trace::{Item, peak_live};
use proptest::prelude::*;

#[derive(Debug, Clone)]
enum Op {
    Alloc(u64),
    Free(usize),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let size = prop_oneof![1_u64..4096, 4096_u64..600_000, 600_000_u64..40_000_000];
    let op = prop_oneof![3 => size.prop_map(Op::Alloc), 2 => any::<usize>().prop_map(Op::Free)];
    prop::collection::vec(op, 1..300)
}

/// Run `ops` and check that live blocks never overlap; returns the offsets given out.
fn drive(placement: &mut dyn Placement, ops: &[Op]) -> Vec<u64> {
    let mut live: BTreeMap<u64, u64> = BTreeMap::new();
    let mut order = Vec::new();
    let mut given = Vec::new();
    for op in ops {
        match *op {
            Op::Alloc(size) => {
                let offset = placement.alloc(size).expect("room");
                let before = live.range(..offset + size).next_back();
                assert!(
                    before.is_none_or(|(&start, &len)| start + len <= offset),
                    "{offset}+{size} overlaps"
                );
                live.insert(offset, size);
                order.push(offset);
                given.push(offset);
            }
            Op::Free(pick) if !order.is_empty() => {
                let offset = order.swap_remove(pick % order.len());
                live.remove(&offset);
                placement.free(offset).expect("live");
                assert!(placement.free(offset).is_err(), "a second free is refused");
            }
            Op::Free(_) => {}
        }
        let requested: u64 = live.values().sum();
        assert!(placement.granted() >= requested);
        assert!(placement.high_water() >= placement.granted());
    }
    for offset in order {
        placement.free(offset).expect("live");
    }
    assert_eq!(placement.granted(), 0);
    given
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn no_policy_gives_out_overlapping_blocks(ops in ops()) {
        drive(&mut RunFit::unlimited(), &ops);
        drive(&mut PureBuddy::new(9, 40), &ops);
        drive(&mut CachingSim::default(), &ops);
        drive(&mut ExpandableSim::default(), &ops);
    }

    #[test]
    fn placement_is_deterministic(ops in ops()) {
        prop_assert_eq!(drive(&mut RunFit::unlimited(), &ops), drive(&mut RunFit::unlimited(), &ops));
    }

    #[test]
    fn everything_coalesces_when_all_is_freed(ops in ops()) {
        let mut pool = RunFit::new(1 << 36, 512 << 10);
        drive(&mut pool, &ops);
        // One block of the whole pool fits again only if no hole is left.
        let offset = pool.alloc(1 << 36).expect("one run");
        prop_assert_eq!(offset, 0);
    }

    #[test]
    fn the_run_index_conserves_units_and_finds_the_best_fit(
        moves in prop::collection::vec((1_u32..70, any::<prop::sample::Index>(), any::<bool>()), 1..200)
    ) {
        let mut index = RunIndex::new(4096);
        index.give(0, 4096);
        let mut taken: Vec<(u32, u32)> = Vec::new();
        for (units, pick, free) in moves {
            if free && !taken.is_empty() {
                let (start, len) = taken.swap_remove(pick.index(taken.len()));
                index.give(start, len);
            } else {
                let runs = index.free_runs();
                let best = runs.iter().filter(|r| r.1 >= units).min_by_key(|r| (r.1, r.0)).map(|r| r.0);
                let got = index.take(units);
                prop_assert_eq!(got, best, "exact best fit, lowest address");
                if let Some(start) = got {
                    taken.push((start, units));
                }
            }
            let held: u64 = taken.iter().map(|t| u64::from(t.1)).sum();
            prop_assert_eq!(held + index.free_units(), 4096);
            let runs = index.free_runs();
            prop_assert!(runs.windows(2).all(|w| w[0].0 + w[0].1 < w[1].0), "neighbours are merged");
            prop_assert_eq!(index.largest(), runs.iter().map(|r| r.1).max().unwrap_or(0));
        }
    }
}

fn item_lists() -> impl Strategy<Value = Vec<Item>> {
    prop::collection::vec((1_u64..3_000_000, 1_u32..40, any::<u8>()), 1..250).prop_map(|raw| {
        let count = raw.len() as u32;
        raw.into_iter()
            .enumerate()
            .map(|(i, (size, life, stays))| Item {
                size,
                end: if stays < 10 {
                    Item::STAYS
                } else {
                    (i as u32 + life).min(count)
                },
            })
            .collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn plans_never_overlap_and_never_go_below_the_peak(items in item_lists()) {
        let made = plan(&items).unwrap();
        verify(&made).unwrap();
        prop_assert!(made.high_water >= peak_live(&items));
        prop_assert_eq!(&made, &plan(&items).unwrap());
    }

    #[test]
    fn a_plan_of_maxima_serves_every_recording_it_was_made_from(
        items in item_lists(), shrink in prop::collection::vec(1_u64..=100, 250)
    ) {
        let smaller: Vec<Item> = items
            .iter()
            .zip(&shrink)
            .map(|(i, &p)| Item { size: (i.size * p / 100).max(1), end: i.end })
            .collect();
        let merged = merge(&items, &smaller).unwrap();
        let mut replay = Replay::new(plan(&merged).unwrap()).unwrap();
        for recording in [&items, &smaller, &items] {
            run_as_recorded(&mut replay, recording)?;
        }
    }

    /// Whatever the step does (other sizes, other frees, more allocations), two live slots never overlap.
    #[test]
    fn any_step_is_safe_under_any_plan(
        items in item_lists(),
        steps in prop::collection::vec(prop::collection::vec((1_u64..4_000_000, any::<usize>(), 0_u8..10), 1..300), 1..4)
    ) {
        let mut replay = Replay::new(plan(&items).unwrap()).unwrap();
        let mut live: BTreeMap<u64, (u64, u32)> = BTreeMap::new();
        for step in steps {
            replay.begin();
            for (size, pick, action) in step {
                match action {
                    0..=5 => {
                        if let Ok((index, offset)) = replay.take(size) {
                            let before = live.range(..offset + size).next_back();
                            prop_assert!(before.is_none_or(|(&s, &(len, _))| s + len <= offset), "overlap at {}", offset);
                            live.insert(offset, (size, index));
                        }
                    }
                    6..=8 if !live.is_empty() => {
                        let key = *live.keys().nth(pick % live.len()).unwrap();
                        let (_, index) = live.remove(&key).unwrap();
                        replay.give(index);
                    }
                    9 => replay.seek((pick % items.len()) as u32),
                    _ => {}
                }
                prop_assert_eq!(replay.live_count() as usize, live.len());
            }
        }
    }
}

fn run_as_recorded(replay: &mut Replay, items: &[Item]) -> std::result::Result<(), TestCaseError> {
    let mut live: Vec<Option<u32>> = vec![None; items.len()];
    replay.begin();
    for index in 0..=items.len() {
        for (other, item) in items.iter().enumerate() {
            if item.end as usize == index
                && let Some(slot) = live[other].take()
            {
                replay.give(slot);
            }
        }
        if let Some(item) = items.get(index) {
            let planned = replay.plan().offsets[index] != UNPLANNED;
            let served = replay.take(item.size);
            prop_assert_eq!(served.is_ok(), planned, "item {}: {:?}", index, served);
            live[index] = served.ok().map(|(slot, _)| slot);
        }
    }
    Ok(())
}
