//! The functions that torch's pluggable allocator calls. None takes the interpreter lock.
//!
//! They are `C-unwind` because an out-of-memory error leaves `lf_alloc` as the C++ exception that torch turns into a
//! Python error. No Rust value with a destructor is alive at that point.

use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use loongforge_pool::error::PoolError;

use crate::global;
use crate::oom::{self, Failure};

/// Allocate. A request of zero bytes gives null, as torch expects. Raises when there is no memory.
pub extern "C-unwind" fn lf_alloc(size: isize, device: c_int, stream: *mut c_void) -> *mut c_void {
    match guarded(|| allocate(size, device, stream)) {
        Ok(address) => address as *mut c_void,
        Err(failure) => {
            oom::raise(failure);
            std::ptr::null_mut()
        }
    }
}

/// Run `call`; a panic of ours becomes an error instead of unwinding into C++.
fn guarded<T>(call: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|_| {
        Err(Failure::Other(
            "the LoongForge allocator failed inside; its message is on standard error. Please report it, and use \
             MemoryConfig(mode=\"off\") meanwhile"
                .to_owned(),
        ))
    })
}

/// As [`guarded`], for hooks that have no way to report anything.
fn quietly(call: impl FnOnce()) {
    let _ = guarded(|| {
        call();
        Ok(())
    });
}

/// Allocate for a memory pool: null tells torch's own allocator to free its caches and to try again.
pub extern "C-unwind" fn lf_pool_alloc(
    size: isize,
    device: c_int,
    stream: *mut c_void,
) -> *mut c_void {
    let before = global::set_label(loongforge_pool::heap::Label::Persistent);
    let served = guarded(|| allocate(size, device, stream));
    global::set_label(before);
    served.map_or(std::ptr::null_mut(), |address| address as *mut c_void)
}

fn allocate(size: isize, device: c_int, stream: *mut c_void) -> Result<u64, Failure> {
    let Ok(size) = u64::try_from(size) else {
        return Err(Failure::Other(format!(
            "{size} bytes were asked for: a size of a tensor has overflowed; check its shape"
        )));
    };
    if size == 0 {
        return Ok(0);
    }
    let start = global::timed().then(Instant::now);
    let mut heap = global::heap(device).map_err(Failure::Other)?;
    let served = heap.alloc(size, stream as u64, global::label());
    if let Some(start) = start {
        heap.alloc_time.add(start.elapsed().as_nanos() as u64);
    }
    served.map_err(|error| match error {
        PoolError::OutOfMemory { .. } => {
            Failure::Memory(heap.last_oom().unwrap_or("CUDA out of memory.").to_owned())
        }
        other => Failure::Memory(format!("CUDA out of memory. The allocator failed: {other}")),
    })
}

/// Free. An address that is not ours is counted and left alone.
pub extern "C-unwind" fn lf_free(
    address: *mut c_void,
    _size: usize,
    device: c_int,
    _stream: *mut c_void,
) {
    if address.is_null() {
        return;
    }
    quietly(|| {
        let start = global::timed().then(Instant::now);
        if let Some(mut heap) = global::existing(device) {
            let _ = heap.free(address as u64);
            if let Some(start) = start {
                heap.free_time.add(start.elapsed().as_nanos() as u64);
            }
        }
    });
}

/// Called with the number of devices; heaps are created on demand.
pub extern "C-unwind" fn lf_init(_devices: c_int) {}

/// `torch.cuda.empty_cache()`, also called when a capture begins.
pub extern "C-unwind" fn lf_reset() {
    quietly(|| {
        for mut heap in global::existing_heaps() {
            heap.trim();
        }
    });
}

/// `set_per_process_memory_fraction`.
pub extern "C-unwind" fn lf_memory_fraction(fraction: f64, device: c_int) {
    if !(0.0..=1.0).contains(&fraction) {
        return;
    }
    quietly(|| {
        if let Ok(mut heap) = global::heap(device)
            && let Some(available) = heap.device().available()
        {
            let total = available + heap.stats().reserved.current;
            heap.set_limit((total as f64 * fraction) as u64);
        }
    });
}

/// Base and size of the driver block that holds an address.
///
/// # Safety
/// `size` is null or points to a writable integer.
pub unsafe extern "C-unwind" fn lf_base_alloc(
    address: *mut c_void,
    size: *mut usize,
) -> *mut c_void {
    let mut found = None;
    quietly(|| {
        found = global::existing_heaps().find_map(|heap| heap.segment_of(address as u64));
    });
    let Some((base, bytes)) = found else {
        return address;
    };
    if !size.is_null() {
        // SAFETY: not null, and the caller owns it.
        unsafe { *size = bytes as usize };
    }
    base as *mut c_void
}

/// `Tensor.record_stream`.
pub extern "C-unwind" fn lf_record_stream(address: *mut c_void, stream: *mut c_void) {
    quietly(|| {
        for mut heap in global::existing_heaps() {
            if heap.owns(address as u64) {
                let _ = heap.record_stream(address as u64, stream as u64);
                return;
            }
        }
    });
}

/// A capture into a graph pool begins. The pool identifier is a pair of integers, which travels in two registers; the
/// filter object is not called, because the driver knows which stream captures.
pub extern "C-unwind" fn lf_begin_pool(
    device: c_int,
    first: u64,
    second: u64,
    _filter: *const c_void,
) {
    quietly(|| {
        if let Ok(mut heap) = global::heap(device) {
            let _ = heap.begin_capture((first, second));
        }
    });
}

/// A capture into a graph pool ended.
pub extern "C-unwind" fn lf_end_pool(device: c_int, first: u64, second: u64) {
    quietly(|| {
        if let Some(mut heap) = global::existing(device) {
            let _ = heap.end_capture((first, second));
        }
    });
}

/// A graph that used the pool is gone.
pub extern "C-unwind" fn lf_release_pool(device: c_int, first: u64, second: u64) {
    quietly(|| {
        if let Some(mut heap) = global::existing(device) {
            let _ = heap.release_pool((first, second));
        }
    });
}

/// Addresses of the functions, by the name of the torch setter they belong to.
pub fn table() -> Vec<(&'static str, usize)> {
    vec![
        ("alloc", lf_alloc as *const () as usize),
        ("free", lf_free as *const () as usize),
        ("pool_alloc", lf_pool_alloc as *const () as usize),
        ("set_init_fn", lf_init as *const () as usize),
        ("set_reset_fn", lf_reset as *const () as usize),
        (
            "set_memory_fraction_fn",
            lf_memory_fraction as *const () as usize,
        ),
        ("set_base_alloc_fn", lf_base_alloc as *const () as usize),
        (
            "set_record_stream_fn",
            lf_record_stream as *const () as usize,
        ),
        (
            "set_begin_allocate_to_pool",
            lf_begin_pool as *const () as usize,
        ),
        (
            "set_end_allocate_to_pool_fn",
            lf_end_pool as *const () as usize,
        ),
        ("set_release_pool", lf_release_pool as *const () as usize),
    ]
}
