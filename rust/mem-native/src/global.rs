//! The heaps of the process: one per device, created at the first allocation, kept until the process ends.
//!
//! They are never dropped: tensors may be freed while the interpreter shuts down, and the driver takes its memory back
//! by itself.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError, RwLock};

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
static HEAPS: [OnceLock<Option<Mutex<Heap>>>; MAX_DEVICES] =
    [const { OnceLock::new() }; MAX_DEVICES];
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
    *CONFIG.write().unwrap_or_else(PoisonError::into_inner) = Some(config);
    Ok(())
}

/// The heap of `device`, created on demand; `None` when nothing is configured or the index is out of range.
pub fn heap(device: i32) -> Option<MutexGuard<'static, Heap>> {
    let slot = HEAPS.get(usize::try_from(device).ok()?)?;
    let heap = match slot.get() {
        Some(heap) => heap,
        None => slot.get_or_init(|| create(device).map(Mutex::new)),
    };
    heap.as_ref()
        .map(|h| h.lock().unwrap_or_else(PoisonError::into_inner))
}

/// The heap of `device` if it exists already.
pub fn existing(device: i32) -> Option<MutexGuard<'static, Heap>> {
    let slot = HEAPS.get(usize::try_from(device).ok()?)?;
    slot.get()?
        .as_ref()
        .map(|h| h.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Every heap that exists.
pub fn existing_heaps() -> impl Iterator<Item = MutexGuard<'static, Heap>> {
    (0..MAX_DEVICES as i32).filter_map(existing)
}

fn create(ordinal: i32) -> Option<Heap> {
    let config = (*CONFIG.read().unwrap_or_else(PoisonError::into_inner))?;
    make(config, ordinal).ok()
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
