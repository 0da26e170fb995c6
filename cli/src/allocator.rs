//! Settings of the system allocator.

/// Keeps freed memory in the process for reuse, if the C library is glibc.
///
/// By default, glibc creates a new mapping for each large block, and the kernel zeroes its pages for each tensor of a
/// step. Peak memory use does not change, but less memory is returned to the system before the process ends.
pub fn keep_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: `mallopt` may be called at any time. An invalid value changes nothing.
    unsafe {
        // The threshold in bytes is an `int`. Larger blocks still get a new mapping.
        libc::mallopt(libc::M_MMAP_THRESHOLD, libc::c_int::MAX);
        libc::mallopt(libc::M_TRIM_THRESHOLD, -1);
    }
}
