//! The CUDA driver, opened at run time: this crate builds and loads with no CUDA toolkit and no driver.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;

use loongforge_pool::error::{PoolError, Result};

pub type Status = c_int;
pub type DevicePtr = u64;
pub type Handle = *mut c_void;

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Location {
    pub kind: c_int,
    pub id: c_int,
}

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct AllocationProp {
    pub kind: c_int,
    pub handle_types: c_int,
    pub location: Location,
    pub win32_meta: u64,
    pub compression: u8,
    pub gpu_direct_rdma: u8,
    pub usage: u16,
    pub reserved: [u8; 4],
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct AccessDesc {
    pub location: Location,
    pub flags: c_int,
}

macro_rules! driver {
    ($($field:ident = $symbol:literal : fn($($arg:ty),*);)*) => {
        /// Entry points of the driver.
        pub struct Driver {
            $(pub $field: unsafe extern "C" fn($($arg),*) -> Status,)*
            pub capture_info: Option<CaptureInfo>,
        }

        impl Driver {
            fn resolve(library: *mut c_void) -> std::result::Result<Self, String> {
                Ok(Self {
                    $($field: {
                        let at = symbol(library, $symbol)
                            .ok_or_else(|| format!("the CUDA driver has no symbol {}", $symbol))?;
                        // SAFETY: the symbol has this C signature in every driver since CUDA 11.
                        unsafe {
                            std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($arg),*) -> Status>(at)
                        }
                    },)*
                    capture_info: symbol(library, "cuStreamGetCaptureInfo_v2").map(|at| {
                        // SAFETY: the symbol has this C signature since CUDA 11.3.
                        unsafe { std::mem::transmute::<*mut c_void, CaptureInfo>(at) }
                    }),
                })
            }
        }
    };
}

/// `cuStreamGetCaptureInfo_v2`.
pub type CaptureInfo = unsafe extern "C" fn(
    Handle,
    *mut c_int,
    *mut c_ulonglong,
    *mut c_void,
    *mut c_void,
    *mut c_void,
) -> Status;

driver! {
    init = "cuInit": fn(c_uint);
    device_get = "cuDeviceGet": fn(*mut c_int, c_int);
    device_total = "cuDeviceTotalMem_v2": fn(*mut usize, c_int);
    primary_retain = "cuDevicePrimaryCtxRetain": fn(*mut Handle, c_int);
    ctx_push = "cuCtxPushCurrent_v2": fn(Handle);
    ctx_pop = "cuCtxPopCurrent_v2": fn(*mut Handle);
    ctx_synchronize = "cuCtxSynchronize": fn();
    mem_alloc = "cuMemAlloc_v2": fn(*mut DevicePtr, usize);
    mem_free = "cuMemFree_v2": fn(DevicePtr);
    mem_info = "cuMemGetInfo_v2": fn(*mut usize, *mut usize);
    host_register = "cuMemHostRegister_v2": fn(*mut c_void, usize, c_uint);
    host_unregister = "cuMemHostUnregister": fn(*mut c_void);
    event_create = "cuEventCreate": fn(*mut Handle, c_uint);
    event_record = "cuEventRecord": fn(Handle, Handle);
    event_query = "cuEventQuery": fn(Handle);
    stream_wait = "cuStreamWaitEvent": fn(Handle, Handle, c_uint);
    stream_capturing = "cuStreamIsCapturing": fn(Handle, *mut c_int);
    capture_mode = "cuThreadExchangeStreamCaptureMode": fn(*mut c_int);
    address_reserve = "cuMemAddressReserve": fn(*mut DevicePtr, usize, usize, DevicePtr, c_ulonglong);
    address_free = "cuMemAddressFree": fn(DevicePtr, usize);
    mem_create = "cuMemCreate": fn(*mut c_ulonglong, usize, *const AllocationProp, c_ulonglong);
    mem_release = "cuMemRelease": fn(c_ulonglong);
    mem_map = "cuMemMap": fn(DevicePtr, usize, usize, c_ulonglong, c_ulonglong);
    mem_unmap = "cuMemUnmap": fn(DevicePtr, usize);
    set_access = "cuMemSetAccess": fn(DevicePtr, usize, *const AccessDesc, usize);
}

/// Environment variable that names another driver library, for tests without a GPU.
pub const DRIVER_VARIABLE: &str = "LOONGFORGE_CUDA_DRIVER";

static DRIVER: OnceLock<std::result::Result<Driver, String>> = OnceLock::new();

/// The driver, opened once per process; the error says what is missing.
pub fn driver() -> std::result::Result<&'static Driver, String> {
    DRIVER.get_or_init(open).as_ref().map_err(Clone::clone)
}

fn open() -> std::result::Result<Driver, String> {
    let name = std::env::var(DRIVER_VARIABLE).unwrap_or_else(|_| "libcuda.so.1".to_owned());
    let path = CString::new(name.clone()).map_err(|e| e.to_string())?;
    // SAFETY: a valid C string; the library stays open for the life of the process.
    let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if library.is_null() {
        return Err(format!(
            "cannot open the CUDA driver {name}: {}",
            last_error()
        ));
    }
    Driver::resolve(library)
}

fn last_error() -> String {
    // SAFETY: dlerror returns null or a C string valid until the next dl call on this thread.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "unknown error".to_owned();
    }
    // SAFETY: checked for null above.
    unsafe { CStr::from_ptr(text.cast::<c_char>()) }
        .to_string_lossy()
        .into_owned()
}

fn symbol(library: *mut c_void, name: &str) -> Option<*mut c_void> {
    let name = CString::new(name).ok()?;
    // SAFETY: the library is open and the name is a C string.
    let at = unsafe { libc::dlsym(library, name.as_ptr()) };
    (!at.is_null()).then_some(at)
}

/// Turn a status into a result.
pub fn check(call: &'static str, status: Status) -> Result<()> {
    if status == 0 {
        Ok(())
    } else {
        Err(PoolError::Device { call, code: status })
    }
}
