//! One piece of anonymous shared memory (memfd), mapped into each process that is given its descriptor.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;

use crate::error::{Error, Result};

/// A shared mapping. The size is sealed, so that no process can shrink it under another one.
#[derive(Debug)]
pub struct Mapping {
    fd: OwnedFd,
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is plain memory; all concurrent access goes through atomics or through slots whose state machine
// gives one side exclusive use.
unsafe impl Send for Mapping {}
// SAFETY: see above.
unsafe impl Sync for Mapping {}

fn system(call: &'static str) -> Error {
    Error::System {
        call,
        source: std::io::Error::last_os_error(),
    }
}

impl Mapping {
    /// Makes `len` bytes of zeroed shared memory. Pages are taken from the system when first written.
    pub fn create(len: usize) -> Result<Self> {
        // SAFETY: a constant C string; the result is checked.
        let raw = unsafe {
            libc::memfd_create(
                c"loongforge".as_ptr(),
                libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING,
            )
        };
        if raw < 0 {
            return Err(system("memfd_create"));
        }
        // SAFETY: a fresh descriptor that nobody else owns.
        let fd = unsafe { OwnedFd::from_raw_fd(raw) };
        let file = File::from(fd);
        file.set_len(len as u64).map_err(|source| Error::System {
            call: "ftruncate",
            source,
        })?;
        let fd = OwnedFd::from(file);
        // SAFETY: plain system call on an owned descriptor.
        let sealed = unsafe {
            libc::fcntl(
                fd.as_raw_fd(),
                libc::F_ADD_SEALS,
                libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL,
            )
        };
        if sealed < 0 {
            return Err(system("fcntl(F_ADD_SEALS)"));
        }
        Self::map(fd)
    }

    /// Maps the memory behind a descriptor.
    pub fn map(fd: OwnedFd) -> Result<Self> {
        let file = File::from(fd);
        let len = file
            .metadata()
            .map_err(|source| Error::System {
                call: "fstat",
                source,
            })?
            .len() as usize;
        let fd = OwnedFd::from(file);
        if len == 0 {
            return Err(Error::Layout {
                actual: "0 bytes".into(),
                expected: "a ring".into(),
            });
        }
        // SAFETY: a new shared mapping of an owned descriptor; the result is checked.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                fd.as_raw_fd(),
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(system("mmap"));
        }
        let base = NonNull::new(base.cast::<u8>()).ok_or_else(|| system("mmap"))?;
        Ok(Self { fd, base, len })
    }

    /// Bytes of the mapping.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True for a mapping of no bytes; there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Address of byte `offset`, which with `bytes` after it must lie inside.
    #[must_use]
    pub fn at(&self, offset: usize, bytes: usize) -> Option<NonNull<u8>> {
        let end = offset.checked_add(bytes)?;
        // SAFETY: the sum stays inside the mapping.
        (end <= self.len).then(|| unsafe { self.base.add(offset) })
    }

    /// The descriptor, to hand to other processes.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Takes pages from the system now, so that running out is an error here and not a signal later.
    pub fn reserve(&self, offset: usize, bytes: usize) -> Result<()> {
        // SAFETY: plain system call on an owned descriptor.
        let code = unsafe { libc::fallocate(self.fd.as_raw_fd(), 0, offset as i64, bytes as i64) };
        if code < 0 {
            Err(system("fallocate"))
        } else {
            Ok(())
        }
    }

    /// Gives pages back to the system; the bytes read as zero afterwards.
    pub fn give_back(&self, offset: usize, bytes: usize) -> Result<()> {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: plain system call on an owned descriptor.
        let code =
            unsafe { libc::fallocate(self.fd.as_raw_fd(), mode, offset as i64, bytes as i64) };
        if code < 0 {
            Err(system("fallocate"))
        } else {
            Ok(())
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping was made with this address and length and is not used afterwards.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}
