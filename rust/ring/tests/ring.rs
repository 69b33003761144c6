//! The ring across two mappings of one process, as an owner and a worker see it.
#![allow(unexpected_cfgs)]
#![cfg(not(loom))]

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use loongforge_ring::Error;
use loongforge_ring::protocol::{FAILED_ITEM, STORED, SlotState};
use loongforge_ring::ring::{NO_SLOT, Ring, Shape};
use proptest::prelude::*;

const SHAPE: Shape = Shape {
    slots: 3,
    items: 8,
    jobs: 4,
    payload: 64,
    workers: 2,
    slot_bytes: 8192,
};
const NOW: Duration = Duration::ZERO;

fn pair() -> (Ring, Ring) {
    pair_of(SHAPE)
}

fn pair_of(shape: Shape) -> (Ring, Ring) {
    let owner = Ring::create(shape).unwrap();
    let worker = Ring::attach(owner.fd().try_clone_to_owned().unwrap()).unwrap();
    (owner, worker)
}

#[test]
fn bytes_written_by_a_worker_are_read_by_the_owner() {
    let (owner, worker) = pair();
    owner.begin(1, 7, 2, 100).unwrap();
    let (place, len) = worker.bytes(1).unwrap();
    assert_eq!(len, 8192);
    // SAFETY: the slot is being filled and this test is its only writer.
    unsafe { place.write_bytes(0xab, 100) };
    assert!(!worker.mark(1, 7, 0, STORED).unwrap());
    assert!(!owner.take(1, 7, NOW).unwrap());
    assert!(worker.mark(1, 7, 1, FAILED_ITEM).unwrap());
    assert!(owner.take(1, 7, NOW).unwrap());
    // SAFETY: the owner holds the slot.
    assert_eq!(unsafe { owner.bytes(1).unwrap().0.add(99).read() }, 0xab);
    assert!(owner.slot(1).unwrap().release());
    owner.shrink(1).unwrap();
    // SAFETY: nobody else uses the slot.
    assert_eq!(unsafe { owner.bytes(1).unwrap().0.read() }, 0);
}

#[test]
fn jobs_come_oldest_first_and_wait_for_their_slot() {
    let (owner, worker) = pair();
    owner.begin(0, 1, 2, 0).unwrap();
    assert_eq!(owner.push(b"collate", 0).unwrap(), Some(0));
    assert_eq!(owner.push(b"decode", NO_SLOT).unwrap(), Some(1));
    let first = worker.claim(0, NOW).unwrap().unwrap();
    assert_eq!(first.payload, b"decode");
    assert!(worker.claim(1, NOW).unwrap().is_none());
    assert!(!worker.mark(0, 1, 0, STORED).unwrap());
    let second = worker.claim(1, NOW).unwrap().unwrap();
    assert_eq!(second.payload, b"collate");
    worker.finish(0, first.entry, None).unwrap();
    worker.finish(1, second.entry, Some(b"broken")).unwrap();
    assert!(worker.finish(1, second.entry, None).is_err());
    let failed = owner.collect();
    assert_eq!(
        (failed.len(), failed[0].error.as_slice()),
        (1, b"broken".as_slice())
    );
    assert_eq!(owner.outstanding(), 0);
}

#[test]
fn board_takes_no_more_than_it_holds_and_reuses_entries() {
    let (owner, worker) = pair();
    for round in 0..5_u64 {
        for n in 0..4 {
            assert_eq!(
                owner.push(&[n], NO_SLOT).unwrap(),
                Some(round * 4 + u64::from(n))
            );
        }
        assert_eq!(owner.push(b"full", NO_SLOT).unwrap(), None);
        assert_eq!(owner.peek(0, 9).len(), 4);
        for n in 0..4 {
            let claim = worker.claim(0, NOW).unwrap().unwrap();
            assert_eq!(claim.payload, [n]);
            worker.finish(0, claim.entry, None).unwrap();
        }
        assert!(owner.collect().is_empty());
    }
}

#[test]
fn jobs_of_a_dead_worker_are_done_by_another_one() {
    let (owner, worker) = pair();
    owner.begin(0, 3, 1, 0).unwrap();
    owner.push(b"work", NO_SLOT).unwrap();
    assert!(worker.claim(1, NOW).unwrap().is_some());
    assert_eq!(owner.claimed()[0].worker, 1);
    assert_eq!(owner.job(0).unwrap(), b"work");
    assert_eq!(owner.job(1), None);
    assert_eq!(owner.requeue(0), 0);
    assert_eq!(owner.requeue(1), 1);
    let again = worker.claim(0, NOW).unwrap().unwrap();
    // The dead worker's late report is refused.
    assert!(worker.finish(1, again.entry, None).is_err());
    assert!(worker.mark(0, 3, 0, STORED).unwrap());
    worker.finish(0, again.entry, None).unwrap();
    assert!(owner.take(0, 3, NOW).unwrap());
}

#[test]
fn waiting_ends_with_the_event_or_with_the_time() {
    let (owner, worker) = pair();
    let start = Instant::now();
    assert!(
        worker
            .claim(0, Duration::from_millis(30))
            .unwrap()
            .is_none()
    );
    assert!(start.elapsed() >= Duration::from_millis(30));
    let owner = Arc::new(owner);
    let other = Arc::clone(&owner);
    let waiter = thread::spawn(move || worker.claim(0, Duration::from_secs(20)).unwrap());
    other.push(b"go", NO_SLOT).unwrap();
    other.wake_workers();
    assert_eq!(waiter.join().unwrap().unwrap().payload, b"go");
    let (owner, worker) = pair();
    let waiter = thread::spawn(move || worker.claim(0, Duration::from_secs(20)).unwrap());
    owner.stop();
    assert!(waiter.join().unwrap().is_none());
}

#[test]
fn wrong_use_is_refused_with_what_is_allowed() {
    let (owner, worker) = pair();
    assert!(matches!(owner.slot(3), Err(Error::Argument { .. })));
    assert!(matches!(
        owner.begin(0, 1, 9, 0),
        Err(Error::Argument { .. })
    ));
    assert!(matches!(
        owner.begin(0, 1, 1, 1 << 20),
        Err(Error::Argument { .. })
    ));
    assert!(matches!(
        owner.push(&[0; 65], NO_SLOT),
        Err(Error::Argument { .. })
    ));
    assert!(matches!(worker.claim(2, NOW), Err(Error::Argument { .. })));
    owner.begin(0, 1, 1, 0).unwrap();
    assert!(matches!(owner.begin(0, 2, 1, 0), Err(Error::State { .. })));
    assert!(matches!(owner.shrink(0), Err(Error::State { .. })));
    assert!(Ring::create(Shape { slots: 0, ..SHAPE }).is_err());
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    assert!(Ring::attach(file.into()).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    /// Random interleavings of an owner and workers that die: every batch is delivered once, in order, complete.
    #[test]
    fn every_batch_is_delivered_once_and_complete(steps in prop::collection::vec(0_u8..6, 50..400)) {
        let (owner, worker) = pair_of(Shape { jobs: 512, ..SHAPE });
        let (mut next, mut due) = (0_u64, 0_u64);
        let mut held: Vec<(u32, usize, Vec<u8>)> = Vec::new();
        let mut stored = std::collections::HashMap::<u64, u32>::new();
        for step in steps {
            match step {
                // Begin a batch in a free slot; its two items are one job each.
                0 => {
                    let free = (0..3).find(|s| owner.slot(*s).unwrap().state() == SlotState::Free);
                    if let Some(slot) = free {
                        let _ = owner.collect();
                        owner.begin(slot, next, 2, 0).unwrap();
                        for item in 0..2_u8 {
                            owner.push(&[slot as u8, next as u8, item], NO_SLOT).unwrap().unwrap();
                        }
                        next += 1;
                    }
                }
                1 | 2 => {
                    let number = u32::from(step) - 1;
                    if held.iter().all(|(w, ..)| *w != number)
                        && let Some(claim) = worker.claim(number, NOW).unwrap()
                    {
                        held.push((number, claim.entry, claim.payload));
                    }
                }
                // A worker finishes.
                3 => if let Some((number, entry, job)) = held.pop() {
                    let sequence = u64::from(job[1]);
                    if worker.slot(job[0] as usize).unwrap().wants(sequence, job[2] as usize) {
                        *stored.entry(sequence).or_default() += 1;
                    }
                    let _ = worker.mark(job[0] as usize, sequence, job[2] as usize, STORED).unwrap();
                    worker.finish(number, entry, None).unwrap();
                },
                // A worker dies, sometimes after it has marked its item.
                4 => if let Some((number, _, job)) = held.pop() {
                    if job[2] == 0 {
                        if worker.slot(job[0] as usize).unwrap().wants(u64::from(job[1]), 0) {
                            *stored.entry(u64::from(job[1])).or_default() += 1;
                        }
                        let _ = worker.mark(job[0] as usize, u64::from(job[1]), 0, STORED).unwrap();
                    }
                    prop_assert_eq!(owner.requeue(number), 1);
                },
                // The owner takes the batch that is due.
                _ => {
                    let ready = (0..3).find(|s| {
                        let slot = owner.slot(*s).unwrap();
                        slot.sequence() == due && slot.state() == SlotState::Ready
                    });
                    if let Some(slot) = ready {
                        prop_assert!(owner.take(slot, due, NOW).unwrap());
                        prop_assert_eq!(stored.get(&due), Some(&2));
                        prop_assert!(owner.slot(slot).unwrap().release());
                        due += 1;
                    }
                }
            }
            let _ = owner.collect();
        }
        prop_assert!(due <= next);
    }
}

/// A worker that dies while it reports an error leaves the job whole for the next one.
#[test]
fn an_error_lies_beside_the_job_not_in_its_place() {
    let (owner, worker) = pair();
    owner.push(b"decode this", NO_SLOT).unwrap();
    let first = worker.claim(0, NOW).unwrap().unwrap();
    worker.finish(0, first.entry, Some(b"no")).unwrap();
    assert_eq!(owner.peek(0, 4).len(), 0);
    let failed = owner.collect();
    assert_eq!(failed[0].error, b"no");
    // The entry is used again: its payload is the new job's, and the old error is not seen.
    owner.push(b"decode that", NO_SLOT).unwrap();
    let second = worker.claim(1, NOW).unwrap().unwrap();
    assert_eq!(second.payload, b"decode that");
    assert_eq!(owner.requeue(1), 1);
    assert_eq!(
        worker.claim(0, NOW).unwrap().unwrap().payload,
        b"decode that"
    );
}

/// A slot's memory is taken once and again only after it was given back.
#[test]
fn memory_of_a_slot_is_taken_once() {
    let (owner, worker) = pair();
    assert_eq!(owner.reserved(0).unwrap(), 0);
    owner.begin(0, 1, 1, 100).unwrap();
    worker.reserve(0, 5000).unwrap();
    worker.reserve(0, 300).unwrap();
    assert_eq!(owner.reserved(0).unwrap(), 5000);
    assert!(worker.mark(0, 1, 0, STORED).unwrap());
    assert!(owner.take(0, 1, NOW).unwrap());
    assert!(owner.slot(0).unwrap().release());
    assert_eq!(owner.states(), vec![0, 0, 0]);
    owner.shrink(0).unwrap();
    assert_eq!(owner.reserved(0).unwrap(), 0);
    owner.begin(0, 2, 1, 8192).unwrap();
    assert_eq!(owner.reserved(0).unwrap(), 8192);
}
