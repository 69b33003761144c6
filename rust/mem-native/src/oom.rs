//! Raising an error in torch.

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_uint};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Address of `c10::detail::torchCheckFail(const char*, const char*, uint32_t, const char*)`, zero when unknown.
static CHECK_FAIL: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// Keeps the text alive while the exception flies: a local would be a destructor in its way.
    static TEXT: RefCell<CString> = RefCell::new(CString::default());
}

type CheckFail = unsafe extern "C-unwind" fn(*const c_char, *const c_char, c_uint, *const c_char);

/// Set the address of torch's function, found by the Python side in libc10.
pub fn set_check_fail(address: usize) {
    CHECK_FAIL.store(address, Ordering::Relaxed);
}

/// Throw `text` as torch's exception; returns only when torch's function is unknown.
pub fn raise(text: String) {
    let address = CHECK_FAIL.load(Ordering::Relaxed);
    if address == 0 {
        return;
    }
    let clean = CString::new(text.replace('\0', " ")).unwrap_or_default();
    let message = TEXT.with(|slot| {
        *slot.borrow_mut() = clean;
        slot.borrow().as_ptr()
    });
    // SAFETY: the address is the function of this signature in the libc10 that is loaded; the strings outlive the call.
    unsafe {
        let fail = std::mem::transmute::<usize, CheckFail>(address);
        fail(c"lf_alloc".as_ptr(), c"loongforge_mem".as_ptr(), 0, message);
    }
}
