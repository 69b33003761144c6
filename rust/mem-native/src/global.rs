//! The heaps of the process: one per device, created at the first allocation, kept until the process ends.
//!
//! They are never dropped: tensors may be freed while the interpreter shuts down, and the driver takes its memory back
//! by itself.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, Once, OnceLock, PoisonError, RwLock};

use loongforge_pool::device::Device;
use loongforge_pool::heap::{Heap, HeapConfig, Label};

use crate::devices::{Backing, CudaDevice, HostDevice};

/// Devices a process may use.
pub const MAX_DEVICES: usize = 16;

/// Where memory comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// Kernel memory.
    Host,
    /// One driver block per reservation.
    Cuda,
    /// Virtual memory committed by chunk.
    Vmm,
}

/// Settings of the process-wide heaps.
#[derive(Debug, Clone, Copy)]
pub struct GlobalConfig {
    /// Backing.
    pub source: Source,
    /// Heap settings.
    pub heap: HeapConfig,
}

static CONFIG: RwLock<Option<GlobalConfig>> = RwLock::new(None);
static HEAPS: [OnceLock<Result<Mutex<Heap>, String>>; MAX_DEVICES] =
    [const { OnceLock::new() }; MAX_DEVICES];
/// Set in the child of a fork: the parent's threads may have held our locks, and its driver is not usable there.
static FORKED: AtomicBool = AtomicBool::new(false);
static AT_FORK: Once = Once::new();
/// Whether each call is timed.
pub static TIMING: AtomicBool = AtomicBool::new(false);

thread_local! {
    static LABEL: Cell<Label> = const { Cell::new(Label::Ephemeral) };
}

/// Set the settings; refused once a heap exists.
pub fn configure(config: GlobalConfig) -> Result<(), String> {
    if HEAPS.iter().any(|h| h.get().is_some()) {
        return Err(
            "the allocator already serves memory; configure it before the first allocation".into(),
        );
    }
    if config.source != Source::Host {
        crate::driver::driver()?;
    }
    AT_FORK.call_once(|| {
        // SAFETY: the handler only stores an atomic, which is allowed in the child of a fork.
        unsafe { libc::pthread_atfork(None, None, Some(note_fork)) };
    });
    *CONFIG.write().unwrap_or_else(PoisonError::into_inner) = Some(config);
    Ok(())
}

extern "C" fn note_fork() {
    FORKED.store(true, Ordering::Relaxed);
}

/// The heap of `device`, created on demand; otherwise why there is none.
pub fn heap(device: i32) -> Result<MutexGuard<'static, Heap>, String> {
    let slot = usize::try_from(device).ok().and_then(|d| HEAPS.get(d));
    let Some(slot) = slot else {
        return Err(format!(
            "device {device} is outside 0..{MAX_DEVICES}, the devices that the LoongForge allocator can serve"
        ));
    };
    if FORKED.load(Ordering::Relaxed) {
        return Err(
            "this process was forked after the LoongForge allocator was set up, and neither it nor CUDA works in a \
             forked child; start workers with the \"spawn\" method"
                .to_owned(),
        );
    }
    let heap = match slot.get() {
        Some(heap) => heap,
        None => slot.get_or_init(|| create(device).map(Mutex::new)),
    };
    match heap {
        Ok(heap) => Ok(heap.lock().unwrap_or_else(PoisonError::into_inner)),
        Err(text) => Err(text.clone()),
    }
}

/// The heap of `device` if it exists already (never in a forked child).
pub fn existing(device: i32) -> Option<MutexGuard<'static, Heap>> {
    let slot = HEAPS.get(usize::try_from(device).ok()?)?;
    let heap = slot.get()?.as_ref().ok()?;
    if FORKED.load(Ordering::Relaxed) {
        return None;
    }
    Some(heap.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Every heap that exists.
pub fn existing_heaps() -> impl Iterator<Item = MutexGuard<'static, Heap>> {
    (0..MAX_DEVICES as i32).filter_map(existing)
}

fn create(ordinal: i32) -> Result<Heap, String> {
    let config = *CONFIG.read().unwrap_or_else(PoisonError::into_inner);
    let Some(config) = config else {
        return Err(format!(
            "the LoongForge allocator has no memory source for device {ordinal}: call install_global_allocator() \
             before the first allocation"
        ));
    };
    make(config, ordinal).map_err(|text| {
        format!("the LoongForge allocator cannot use device {ordinal}: {text}; restart the process with the device usable")
    })
}

/// A heap over a fresh device.
pub fn make(config: GlobalConfig, ordinal: i32) -> Result<Heap, String> {
    let mut heap_config = config.heap;
    let device: Box<dyn Device> = match config.source {
        Source::Host => Box::new(HostDevice),
        Source::Cuda => Box::new(CudaDevice::new(ordinal, Backing::Block)?),
        Source::Vmm => {
            let mut device = CudaDevice::new(ordinal, Backing::Virtual)?;
            // Addresses cost nothing: reserve as many as the device has bytes.
            let total = device.total_bytes().map_err(|e| e.to_string())?;
            heap_config.initial_bytes = total.next_multiple_of(1 << 30);
            Box::new(device)
        }
    };
    Ok(Heap::new(device, heap_config))
}

/// Label of allocations made by this thread.
pub fn label() -> Label {
    LABEL.get()
}

/// Set the label of this thread; returns the one before.
pub fn set_label(label: Label) -> Label {
    LABEL.replace(label)
}

/// Whether calls are timed.
pub fn timed() -> bool {
    TIMING.load(Ordering::Relaxed)
}
