//! Peak resident memory of this process, as counted by Linux.

use std::fs;

/// Resets the peak, if the system supports it.
pub fn reset_peak() {
    // See man 5 proc_pid_clear_refs for the value "5". If the write fails, the peak includes the time before.
    let _ = fs::write("/proc/self/clear_refs", "5");
}

/// Returns the peak in bytes since the last reset, or `None` if the system does not report it.
pub fn peak_bytes() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}
