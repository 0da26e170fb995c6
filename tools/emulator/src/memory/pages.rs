//! Large allocations that are filled with ones, but use no host memory until they are written.
//!
//! A file in memory, filled with ones, is mapped repeatedly as copy-on-write. If this is not possible, a large
//! allocation is left uninitialised.

use std::alloc::{Layout, alloc, dealloc};

use super::ALIGNMENT;

/// The minimum size of a large allocation in bytes.
const LARGE: usize = 64 << 20;

/// Allocates memory. Returns `None` if the host has no more memory.
pub(super) fn allocate(bytes: usize) -> Option<*mut u8> {
    if bytes >= LARGE
        && let Some(start) = mapped::allocate(bytes)
    {
        return Some(start);
    }
    let layout = layout(bytes)?;
    // SAFETY: the layout is not empty.
    let start = unsafe { alloc(layout) };
    if start.is_null() {
        return None;
    }
    if bytes < LARGE {
        // SAFETY: the memory was just allocated with this size.
        unsafe { start.write_bytes(0xff, layout.size()) };
    }
    Some(start)
}

/// Frees memory that was [allocated](allocate) with this size.
///
/// # Safety
///
/// The memory must have been allocated with this size. It must not have been freed, and nothing may refer to it.
pub(super) unsafe fn free(start: *mut u8, bytes: usize) {
    // SAFETY: guaranteed by the caller. Mapped addresses are distinguished from other addresses.
    unsafe {
        if bytes >= LARGE && mapped::free(start, bytes) {
            return;
        }
        if let Some(layout) = layout(bytes) {
            dealloc(start, layout);
        }
    }
}

fn layout(bytes: usize) -> Option<Layout> {
    Layout::from_size_align(bytes.max(1), ALIGNMENT).ok()
}

#[cfg(target_os = "linux")]
mod mapped {
    use std::fs::File;
    use std::io::Write;
    use std::os::fd::{AsRawFd, FromRawFd};
    use std::sync::OnceLock;

    use parking_lot::Mutex;

    /// The size of the file in bytes.
    const FILE: usize = 32 << 20;

    /// The mapped regions, for `free`.
    static MAPPED: Mutex<Vec<usize>> = Mutex::new(Vec::new());

    fn ones() -> Option<&'static File> {
        static ONES: OnceLock<Option<File>> = OnceLock::new();
        let make = || {
            // SAFETY: the name ends with a zero.
            let file = unsafe { libc::memfd_create(c"ones".as_ptr(), libc::MFD_CLOEXEC) };
            if file < 0 {
                return None;
            }
            // SAFETY: the file was just opened, and nothing else owns it.
            let mut file = unsafe { File::from_raw_fd(file) };
            let page = vec![0xff; 1 << 20];
            (0..FILE / page.len())
                .try_for_each(|_| file.write_all(&page))
                .ok()?;
            Some(file)
        };
        ONES.get_or_init(make).as_ref()
    }

    pub fn allocate(bytes: usize) -> Option<*mut u8> {
        let file = ones()?.as_raw_fd();
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let nothing = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: the call creates a new range at an address that the system chooses.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, nothing, -1, 0) };
        if start == libc::MAP_FAILED {
            return None;
        }
        for offset in (0..bytes).step_by(FILE) {
            let length = FILE.min(bytes - offset);
            let at = start.wrapping_byte_add(offset);
            let fixed = libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_NORESERVE;
            // SAFETY: the address is inside the new range, which nothing uses yet.
            let mapped = unsafe { libc::mmap(at, length, access, fixed, file, 0) };
            if mapped == libc::MAP_FAILED {
                // SAFETY: the range was just created.
                unsafe { libc::munmap(start, bytes) };
                return None;
            }
        }
        MAPPED.lock().push(start as usize);
        Some(start.cast())
    }

    /// Frees a mapped range. Returns whether the range was mapped here.
    pub unsafe fn free(start: *mut u8, bytes: usize) -> bool {
        let mut mapped = MAPPED.lock();
        let Some(place) = mapped.iter().position(|other| *other == start as usize) else {
            return false;
        };
        mapped.swap_remove(place);
        // SAFETY: the range was mapped with this size, and the caller guarantees that nothing refers to it.
        unsafe { libc::munmap(start.cast(), bytes) };
        true
    }
}

#[cfg(not(target_os = "linux"))]
mod mapped {
    pub fn allocate(_bytes: usize) -> Option<*mut u8> {
        None
    }

    pub unsafe fn free(_start: *mut u8, _bytes: usize) -> bool {
        false
    }
}
