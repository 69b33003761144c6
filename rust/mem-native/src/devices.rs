//! Backings: host memory, one driver block per reservation, virtual memory committed chunk by chunk.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::ptr;

use loongforge_pool::device::{Device, EventId, StreamId};
use loongforge_pool::error::{PoolError, Result};

use crate::driver::{AccessDesc, AllocationProp, Driver, Handle, Location, check, driver};

/// Host memory from the kernel: for tests and for machines without a GPU. There are no streams, so events are always
/// done.
#[derive(Default)]
pub struct HostDevice;

impl Device for HostDevice {
    fn reserve(&mut self, bytes: u64) -> Result<u64> {
        let size = usize::try_from(bytes).map_err(|_| PoolError::BadSize {
            size: bytes,
            max: 1 << 47,
        })?;
        // SAFETY: an anonymous mapping with no fixed address touches no memory of ours.
        let at = unsafe {
            libc::mmap(
                ptr::null_mut(),
                size,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if at == libc::MAP_FAILED {
            return Err(PoolError::Device {
                call: "mmap",
                code: last_errno(),
            });
        }
        Ok(at as u64)
    }

    fn release(&mut self, base: u64, bytes: u64) {
        // SAFETY: the heap gives back exactly what reserve returned, with no live block in it.
        unsafe { libc::munmap(base as *mut c_void, bytes as usize) };
    }

    fn record(&mut self, _stream: StreamId) -> Result<EventId> {
        Ok(0)
    }

    fn done(&mut self, _event: EventId) -> Result<bool> {
        Ok(true)
    }

    fn wait(&mut self, _stream: StreamId, _event: EventId) -> Result<()> {
        Ok(())
    }

    fn forget(&mut self, _event: EventId) {}

    fn capture(&mut self, _stream: StreamId) -> Option<u64> {
        None
    }

    fn synchronize(&mut self) -> Result<()> {
        Ok(())
    }
}

fn last_errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(-1)
}

/// How a CUDA device backs its reservations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backing {
    /// One driver allocation per reservation: usable for IPC, NCCL registration and peer access.
    Block,
    /// Reserved addresses with chunks committed on first use.
    Virtual,
}

const CHUNK: u64 = 32 << 20;

/// A CUDA device through the driver. Events are recycled.
pub struct CudaDevice {
    driver: &'static Driver,
    ordinal: c_int,
    context: Handle,
    backing: Backing,
    events: Vec<EventId>,
    chunks: HashMap<u64, u64>,
}

// SAFETY: the raw context handle may be used from any thread; the driver is thread-safe.
unsafe impl Send for CudaDevice {}

impl CudaDevice {
    /// A device over the driver. Touches nothing until the first call.
    pub fn new(ordinal: i32, backing: Backing) -> std::result::Result<Self, String> {
        Ok(Self {
            driver: driver()?,
            ordinal,
            context: ptr::null_mut(),
            backing,
            events: Vec::new(),
            chunks: HashMap::new(),
        })
    }

    /// Memory of the device in bytes.
    pub fn total_bytes(&mut self) -> Result<u64> {
        self.with(|d, ordinal| {
            let mut total = 0;
            // SAFETY: out parameter of the declared type.
            check("cuDeviceTotalMem", unsafe {
                (d.device_total)(&raw mut total, ordinal)
            })?;
            Ok(total as u64)
        })
    }

    /// Run `call` with the primary context current and stream capture relaxed, so that nothing here ends a capture.
    fn with<T>(&mut self, call: impl FnOnce(&Driver, c_int) -> Result<T>) -> Result<T> {
        let d = self.driver;
        if self.context.is_null() {
            // SAFETY: plain calls with out parameters of the declared types; the primary context is kept for ever.
            unsafe {
                check("cuInit", (d.init)(0))?;
                let mut device = 0;
                check("cuDeviceGet", (d.device_get)(&raw mut device, self.ordinal))?;
                check(
                    "cuDevicePrimaryCtxRetain",
                    (d.primary_retain)(&raw mut self.context, device),
                )?;
            }
        }
        let mut mode: c_int = 2;
        // SAFETY: the context is valid; push and pop are paired on this thread.
        unsafe {
            check("cuCtxPushCurrent", (d.ctx_push)(self.context))?;
            (d.capture_mode)(&raw mut mode);
        }
        let outcome = call(d, self.ordinal);
        let mut popped = ptr::null_mut();
        // SAFETY: undoes the two calls above.
        unsafe {
            (d.capture_mode)(&raw mut mode);
            (d.ctx_pop)(&raw mut popped);
        }
        outcome
    }

    fn location(&self) -> Location {
        Location {
            kind: 1,
            id: self.ordinal,
        }
    }
}

fn stream_handle(stream: StreamId) -> Handle {
    stream as Handle
}

impl Device for CudaDevice {
    fn reserve(&mut self, bytes: u64) -> Result<u64> {
        let backing = self.backing;
        self.with(|d, _| {
            let mut at = 0;
            // SAFETY: out parameter of the declared type.
            unsafe {
                match backing {
                    Backing::Block => {
                        check("cuMemAlloc", (d.mem_alloc)(&raw mut at, bytes as usize))?;
                    }
                    Backing::Virtual => check(
                        "cuMemAddressReserve",
                        (d.address_reserve)(
                            &raw mut at,
                            bytes.div_ceil(CHUNK) as usize * CHUNK as usize,
                            0,
                            0,
                            0,
                        ),
                    )?,
                }
            }
            Ok(at)
        })
    }

    fn release(&mut self, base: u64, bytes: u64) {
        let backing = self.backing;
        let _ = self.with(|d, _| {
            // SAFETY: the heap gives back exactly what reserve returned, after the device is idle.
            unsafe {
                match backing {
                    Backing::Block => check("cuMemFree", (d.mem_free)(base)),
                    Backing::Virtual => {
                        check("cuMemAddressFree", (d.address_free)(base, bytes as usize))
                    }
                }
            }
        });
    }

    fn commits(&self) -> bool {
        self.backing == Backing::Virtual
    }

    fn commit_bytes(&self) -> u64 {
        if self.backing == Backing::Virtual {
            CHUNK
        } else {
            loongforge_pool::SPAN
        }
    }

    fn commit(&mut self, address: u64, bytes: u64) -> Result<()> {
        let location = self.location();
        let handle = self.with(|d, _| {
            let prop = AllocationProp {
                kind: 1,
                location,
                ..AllocationProp::default()
            };
            let access = AccessDesc { location, flags: 3 };
            let size = bytes as usize;
            let mut handle = 0;
            // SAFETY: the range lies inside our reservation and has no memory behind it yet.
            unsafe {
                check(
                    "cuMemCreate",
                    (d.mem_create)(&raw mut handle, size, &raw const prop, 0),
                )?;
                let mapped =
                    check("cuMemMap", (d.mem_map)(address, size, 0, handle, 0)).and_then(|()| {
                        check(
                            "cuMemSetAccess",
                            (d.set_access)(address, size, &raw const access, 1),
                        )
                        .inspect_err(|_| {
                            (d.mem_unmap)(address, size);
                        })
                    });
                if let Err(error) = mapped {
                    (d.mem_release)(handle);
                    return Err(error);
                }
            }
            Ok(handle)
        })?;
        self.chunks.insert(address, handle);
        Ok(())
    }

    fn decommit(&mut self, address: u64, bytes: u64) {
        let Some(handle) = self.chunks.remove(&address) else {
            return;
        };
        let _ = self.with(|d, _| {
            // SAFETY: the chunk was committed by us and the device is idle.
            unsafe {
                check("cuMemUnmap", (d.mem_unmap)(address, bytes as usize))?;
                check("cuMemRelease", (d.mem_release)(handle))
            }
        });
    }

    fn record(&mut self, stream: StreamId) -> Result<EventId> {
        let event = match self.events.pop() {
            Some(event) => event,
            None => self.with(|d, _| {
                let mut event = ptr::null_mut();
                // SAFETY: out parameter of the declared type; 2: no timing.
                check("cuEventCreate", unsafe {
                    (d.event_create)(&raw mut event, 2)
                })?;
                Ok(event as EventId)
            })?,
        };
        let recorded = self.with(|d, _| {
            // SAFETY: an event of ours; the stream handle comes from torch and is alive.
            check("cuEventRecord", unsafe {
                (d.event_record)(event as Handle, stream_handle(stream))
            })
        });
        // A stream that refuses (it captures, or is gone) is asked again later, so the event must not be lost.
        recorded.inspect_err(|_| self.events.push(event))?;
        Ok(event)
    }

    fn done(&mut self, event: EventId) -> Result<bool> {
        self.with(|d, _| {
            // SAFETY: an event we recorded.
            match unsafe { (d.event_query)(event as Handle) } {
                0 => Ok(true),
                // CUDA_ERROR_NOT_READY
                600 => Ok(false),
                code => Err(PoolError::Device {
                    call: "cuEventQuery",
                    code,
                }),
            }
        })
    }

    fn wait(&mut self, stream: StreamId, event: EventId) -> Result<()> {
        self.with(|d, _| {
            // SAFETY: an event we recorded and a live stream.
            check("cuStreamWaitEvent", unsafe {
                (d.stream_wait)(stream_handle(stream), event as Handle, 0)
            })
        })
    }

    fn forget(&mut self, event: EventId) {
        self.events.push(event);
    }

    fn capture(&mut self, stream: StreamId) -> Option<u64> {
        self.with(|d, _| {
            let (mut status, mut id) = (0, 0);
            // SAFETY: out parameters of the declared types; the optional ones are null.
            unsafe {
                if let Some(info) = d.capture_info {
                    let null = ptr::null_mut();
                    let out = (&raw mut status, &raw mut id);
                    check(
                        "cuStreamGetCaptureInfo",
                        info(stream_handle(stream), out.0, out.1, null, null, null),
                    )?;
                } else {
                    check(
                        "cuStreamIsCapturing",
                        (d.stream_capturing)(stream_handle(stream), &raw mut status),
                    )?;
                    id = stream;
                }
            }
            Ok((status == 1).then_some(id))
        })
        .ok()
        .flatten()
    }

    fn synchronize(&mut self) -> Result<()> {
        self.with(|d, _| {
            // SAFETY: no arguments.
            check("cuCtxSynchronize", unsafe { (d.ctx_synchronize)() })
        })
    }

    fn available(&mut self) -> Option<u64> {
        self.with(|d, _| {
            let (mut free, mut total) = (0, 0);
            // SAFETY: out parameters of the declared types.
            check("cuMemGetInfo", unsafe {
                (d.mem_info)(&raw mut free, &raw mut total)
            })?;
            Ok(free as u64)
        })
        .ok()
    }
}
