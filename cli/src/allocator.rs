//! The settings of the system's allocator that the command requests.

/// Memory that is freed stays with the process and is used again, where the C library is glibc.
///
/// By default glibc maps each large block anew, and the kernel then zeroes its pages: as many as there are tensors in a
/// step. The most memory that is in use stays the same, but less of it is given back before the end.
pub fn keep_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: `mallopt` may be called at any time. A value that it refuses changes nothing.
    unsafe {
        // The threshold in bytes is an `int`; blocks above it are still mapped anew.
        libc::mallopt(libc::M_MMAP_THRESHOLD, libc::c_int::MAX);
        libc::mallopt(libc::M_TRIM_THRESHOLD, -1);
    }
}
