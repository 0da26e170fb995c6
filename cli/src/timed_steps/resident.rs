//! The most resident memory of this process, which Linux counts.

use std::fs;

/// Starts to count anew, where the system can.
pub fn reset_peak() {
    // What "5" does: man 5 proc_pid_clear_refs. Without it the peak is that of the whole process.
    let _ = fs::write("/proc/self/clear_refs", "5");
}

/// The most bytes since then; `None` where the system does not tell.
pub fn peak_bytes() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}
