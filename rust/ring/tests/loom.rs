//! Every interleaving of writers, reader and owner on the slot and job state machines.
//! Run with `RUSTFLAGS="--cfg loom" cargo test -p loongforge-ring --release --test loom`.
#![allow(unexpected_cfgs)]
#![cfg(loom)]

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use loom::thread;
use loongforge_ring::protocol::{FAILED_ITEM, JobState, STORED, Slot, SlotHead, SlotState, job};

struct Shared {
    head: SlotHead,
    marks: Vec<AtomicU8>,
    bytes: Vec<AtomicU8>,
}

impl Shared {
    fn new(items: usize) -> Self {
        let head = SlotHead {
            state: AtomicU32::new(0),
            items: AtomicU32::new(0),
            sequence: AtomicU64::new(0),
            began: AtomicU64::new(0),
            ready: AtomicU64::new(0),
            reserved: AtomicU64::new(0),
        };
        let zeros = |n: usize| (0..n).map(|_| AtomicU8::new(0)).collect();
        Self {
            head,
            marks: zeros(items),
            bytes: zeros(items),
        }
    }

    fn slot(&self) -> Slot<'_> {
        Slot {
            head: &self.head,
            marks: &self.marks,
        }
    }
}

/// Two writers mark the last two items at the same time: exactly one makes the slot ready, and the reader sees the
/// bytes of both.
#[test]
fn two_writers_one_reader() {
    loom::model(|| {
        let shared = Arc::new(Shared::new(2));
        assert!(shared.slot().begin(5, 2));
        let writers: Vec<_> = (0..2)
            .map(|item| {
                let shared = Arc::clone(&shared);
                thread::spawn(move || {
                    shared.bytes[item].store(item as u8 + 1, Ordering::Relaxed);
                    shared.slot().mark(5, item, STORED)
                })
            })
            .collect();
        let mut taken = shared.slot().take(5);
        if taken {
            assert_eq!(shared.bytes[0].load(Ordering::Relaxed), 1);
            assert_eq!(shared.bytes[1].load(Ordering::Relaxed), 2);
        }
        let made_ready = writers
            .into_iter()
            .map(|w| w.join().unwrap())
            .filter(|made| *made)
            .count();
        assert_eq!(made_ready, 1);
        taken |= shared.slot().take(5);
        assert!(taken);
        assert!(!shared.slot().take(5));
    });
}

/// A writer dies after its mark but before it looks whether the slot is complete; the owner settles it while another
/// writer repeats the item. The slot becomes ready once.
#[test]
fn death_between_mark_and_check_is_repaired() {
    loom::model(|| {
        let shared = Arc::new(Shared::new(1));
        assert!(shared.slot().begin(9, 1));
        let dying = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || shared.marks[0].store(STORED, Ordering::Release))
        };
        let redo = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                shared.slot().wants(9, 0) && shared.slot().mark(9, 0, FAILED_ITEM)
            })
        };
        dying.join().unwrap();
        let by_owner = shared.slot().settle();
        let by_redo = redo.join().unwrap();
        assert!(by_owner != by_redo || shared.slot().state() == SlotState::Ready);
        assert!(shared.slot().take(9));
    });
}

/// Two workers and the owner, who takes a claim back from worker 1 once it is dead: the job is held by one worker at a
/// time and ends once.
#[test]
fn a_job_has_one_holder() {
    loom::model(|| {
        let state = Arc::new(JobState(AtomicU32::new(job::EMPTY)));
        let ended = Arc::new(AtomicUsize::new(0));
        state.publish();
        let workers: Vec<_> = (1..3)
            .map(|worker| {
                let (state, ended) = (Arc::clone(&state), Arc::clone(&ended));
                thread::spawn(move || {
                    if state.claim(worker) && worker == 2 && state.finish(worker, false) {
                        ended.fetch_add(1, Ordering::SeqCst);
                    }
                })
            })
            .collect();
        for worker in workers {
            worker.join().unwrap();
        }
        if state.requeue(1) {
            assert!(state.claim(2));
            assert!(state.finish(2, false));
            ended.fetch_add(1, Ordering::SeqCst);
        }
        assert_eq!(ended.load(Ordering::SeqCst), 1);
        assert!(state.clear());
    });
}
