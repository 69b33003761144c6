//! Raising errors in torch: its own out-of-memory error where libc10 lets us construct one, else its general one.
//!
//! torch's pluggable allocator has no way to report an error: it hands on whatever `alloc` returns. But a C++ exception
//! that leaves `alloc` travels through torch like any of its own, so one of the class that torch turns into
//! `torch.OutOfMemoryError` is built here by the constructor that libc10 exports, in memory from the C++ runtime.

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_uint, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{PoisonError, RwLock};

/// Why a request failed.
#[derive(Debug)]
pub enum Failure {
    /// There is no memory.
    Memory(String),
    /// Anything else: a wrong call, or a fault of ours.
    Other(String),
}

/// Address of `c10::detail::torchCheckFail(const char*, const char*, uint32_t, const char*)`, zero when unknown.
static CHECK_FAIL: AtomicUsize = AtomicUsize::new(0);
static THROWER: RwLock<Option<Thrower>> = RwLock::new(None);

thread_local! {
    /// Keeps the text alive while the exception flies: a local would be a destructor in its way.
    static TEXT: RefCell<CString> = RefCell::new(CString::default());
}

/// Addresses of what it takes to throw `c10::OutOfMemoryError`.
#[derive(Debug, Clone, Copy)]
pub struct Thrower {
    /// `c10::OutOfMemoryError::OutOfMemoryError(c10::SourceLocation, std::string)`, or the one of its base `c10::Error`
    /// where the class adds nothing but its name.
    pub constructor: usize,
    /// `vtable for c10::OutOfMemoryError` when the constructor is that of the base, else zero.
    pub vtable: usize,
    /// `typeinfo for c10::OutOfMemoryError`.
    pub typeinfo: usize,
    /// `__cxa_allocate_exception`.
    pub allocate: usize,
    /// `__cxa_throw`.
    pub throw: usize,
    /// `operator new(size_t)`.
    pub new: usize,
    /// `operator delete(void*)`.
    pub delete: usize,
}

/// `c10::SourceLocation`.
#[repr(C)]
struct SourceLocation {
    function: *const c_char,
    file: *const c_char,
    line: c_uint,
}

/// `std::string` of the C++11 ABI of libstdc++; texts that do not fit `local` lie in memory from `operator new`.
#[repr(C)]
struct CxxString {
    data: *mut c_char,
    len: usize,
    local: [usize; 2],
}

type CheckFail = unsafe extern "C-unwind" fn(*const c_char, *const c_char, c_uint, *const c_char);
type Constructor = unsafe extern "C-unwind" fn(*mut c_void, SourceLocation, *mut CxxString);
type Allocate = unsafe extern "C-unwind" fn(usize) -> *mut c_void;
type Delete = unsafe extern "C-unwind" fn(*mut c_void);
type Throw = unsafe extern "C-unwind" fn(*mut c_void, *mut c_void, Delete) -> !;

/// Bytes asked for the exception object; the class has about 150 in the releases from 2.9 to 2.13.
const OBJECT_BYTES: usize = 2048;
const FUNCTION: &std::ffi::CStr = c"lf_alloc";
const FILE: &std::ffi::CStr = c"loongforge_mem";

/// Set the address of torch's function for general errors, found by the Python side in libc10.
pub fn set_check_fail(address: usize) {
    CHECK_FAIL.store(address, Ordering::Relaxed);
}

/// Set how to throw torch's out-of-memory error.
pub fn set_thrower(thrower: Option<Thrower>) {
    *THROWER.write().unwrap_or_else(PoisonError::into_inner) = thrower;
}

/// Throw `failure` as torch's exception; returns only when none of torch's functions is known.
pub fn raise(failure: Failure) {
    let thrower = *THROWER.read().unwrap_or_else(PoisonError::into_inner);
    match (failure, thrower) {
        (Failure::Memory(text), Some(thrower)) => throw_out_of_memory(thrower, text),
        (Failure::Memory(text) | Failure::Other(text), _) => check_fail(text),
    }
}

fn throw_out_of_memory(t: Thrower, text: String) {
    // SAFETY: the addresses are those of the named functions in the libc10 and libstdc++ that are loaded (the Python
    // side looked them up by their mangled names, which carry the signatures). The string has the layout that the name
    // of the constructor states (`__cxx11`), its characters come from `operator new`, and what the constructor leaves of
    // them is given back. The first entry of the object's virtual table is its complete destructor. No Rust value with a
    // destructor is alive when the exception leaves.
    unsafe {
        let new = std::mem::transmute::<usize, Allocate>(t.new);
        let delete = std::mem::transmute::<usize, Delete>(t.delete);
        let len = text.len();
        let data = new(len + 1).cast::<c_char>();
        std::ptr::copy_nonoverlapping(text.as_ptr().cast::<c_char>(), data, len);
        *data.add(len) = 0;
        drop(text);
        let mut message = CxxString {
            data,
            len,
            // Longer than the 15 characters that `local` could hold: the first word is the capacity.
            local: [len, 0],
        };
        let allocate = std::mem::transmute::<usize, Allocate>(t.allocate);
        let object = allocate(OBJECT_BYTES);
        let construct = std::mem::transmute::<usize, Constructor>(t.constructor);
        let location = SourceLocation {
            function: FUNCTION.as_ptr(),
            file: FILE.as_ptr(),
            line: 0,
        };
        construct(object, location, &raw mut message);
        if message.data.cast::<c_void>() != (&raw mut message.local).cast::<c_void>() {
            delete(message.data.cast());
        }
        if t.vtable != 0 {
            // Behind the offset to the top and the type information: what the derived constructor would store.
            *object.cast::<usize>() = t.vtable + 2 * size_of::<usize>();
        }
        let virtual_table = *object.cast::<*const Delete>();
        let throw = std::mem::transmute::<usize, Throw>(t.throw);
        throw(object, t.typeinfo as *mut c_void, *virtual_table);
    }
}

fn check_fail(text: String) {
    let address = CHECK_FAIL.load(Ordering::Relaxed);
    if address == 0 {
        return;
    }
    let clean = CString::new(text.replace('\0', " ")).unwrap_or_default();
    drop(text);
    // A thread that is ending has no slot any more: then the text is given up, not the process.
    let message = TEXT.try_with(|slot| {
        *slot.borrow_mut() = clean;
        slot.borrow().as_ptr()
    });
    let message = message.unwrap_or(c"CUDA out of memory.".as_ptr());
    // SAFETY: the address is the function of this signature in the libc10 that is loaded; the strings outlive the call.
    unsafe {
        let fail = std::mem::transmute::<usize, CheckFail>(address);
        fail(FUNCTION.as_ptr(), FILE.as_ptr(), 0, message);
    }
}
