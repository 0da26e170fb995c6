//! Ends of the process itself.

#[cfg(unix)]
use std::{thread::sleep, time::Duration};

use super::FaultKind;

/// Whether this system can do it.
#[cfg(unix)]
pub(super) fn check(_kind: FaultKind) -> Result<(), String> {
    Ok(())
}

/// Whether this system can do it.
#[cfg(not(unix))]
pub(super) fn check(kind: FaultKind) -> Result<(), String> {
    match kind {
        FaultKind::Kill
        | FaultKind::Segfault
        | FaultKind::Stop
        | FaultKind::Terminate
        | FaultKind::Interrupt => Err(format!("{kind} needs the signals of a Unix system")),
        _ => Ok(()),
    }
}

/// Strikes this process. What it survives returns: a signal that is handled, or a stop that was ended.
#[cfg(unix)]
pub(super) fn end(kind: FaultKind) -> Result<(), String> {
    let signal = match kind {
        FaultKind::Kill => libc::SIGKILL,
        FaultKind::Stop => libc::SIGSTOP,
        FaultKind::Terminate => libc::SIGTERM,
        FaultKind::Interrupt => libc::SIGINT,
        FaultKind::Segfault => write_nowhere(),
        other => return Err(format!("{other} is no end of a process")),
    };
    // SAFETY: both calls take and return plain numbers, and the signal is one of those above.
    let sent = unsafe { libc::kill(libc::getpid(), signal) };
    if sent != 0 {
        return Err(std::io::Error::last_os_error().to_string());
    }
    // Another thread may be the one that takes the signal: the call is not to slip through before.
    sleep(Duration::from_millis(20));
    Ok(())
}

/// A real fault of the memory, not a signal that is sent, so that handlers see what they would see.
#[cfg(unix)]
fn write_nowhere() -> libc::c_int {
    // The first page belongs to no process; null itself would be caught before the write.
    const NOWHERE: usize = 16;
    // SAFETY: not safe, on purpose: no page is mapped there, so the write ends the process and nothing
    // runs after it. It is volatile, so it is not optimised away or assumed never to happen.
    unsafe { std::ptr::without_provenance_mut::<u8>(NOWHERE).write_volatile(1) };
    libc::SIGSEGV
}

/// Nothing of the kind can be asked for here.
#[cfg(not(unix))]
pub(super) fn end(kind: FaultKind) -> Result<(), String> {
    check(kind)
}
