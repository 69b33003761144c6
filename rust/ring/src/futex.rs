//! Waiting on a word in shared memory, across processes, always with a time limit.

use std::time::{Duration, Instant};

use crate::sync::{AtomicU32, Ordering};

/// Sleeps until the word differs from `seen`, a wake-up arrives, or the time is over. Spurious returns are possible.
pub fn wait(word: &AtomicU32, seen: u32, timeout: Duration) {
    let limit = libc::timespec {
        tv_sec: timeout.as_secs().min(1 << 30) as libc::time_t,
        tv_nsec: libc::c_long::from(timeout.subsec_nanos()),
    };
    // SAFETY: the word is a live, aligned u32; the kernel reads `limit` before returning. Not FUTEX_PRIVATE, since the
    // word is shared between processes. Errors (EAGAIN, EINTR, ETIMEDOUT) all mean: look again.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            std::ptr::from_ref(word).cast::<u32>(),
            libc::FUTEX_WAIT,
            seen,
            std::ptr::from_ref(&limit),
        );
    }
}

/// Changes the word and wakes everybody who waits on it.
pub fn bump(word: &AtomicU32) {
    word.fetch_add(1, Ordering::SeqCst);
    // SAFETY: as above; FUTEX_WAKE only looks the address up.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            std::ptr::from_ref(word).cast::<u32>(),
            libc::FUTEX_WAKE,
            i32::MAX,
        );
    }
}

/// Calls `ready` until it gives a value or the time is over, sleeping on `word` in between.
pub fn until<T>(
    word: &AtomicU32,
    timeout: Duration,
    mut ready: impl FnMut() -> Option<T>,
) -> Option<T> {
    let deadline = Instant::now() + timeout;
    loop {
        let seen = word.load(Ordering::SeqCst);
        if let Some(value) = ready() {
            return Some(value);
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return None;
        }
        wait(word, seen, left);
    }
}

/// Nanoseconds of the monotonic clock, the same in all processes of a machine.
#[must_use]
pub fn now() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: writes into a live timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    (time.tv_sec as u64) * 1_000_000_000 + time.tv_nsec as u64
}
