//! Signals and memory faults that affect the process itself.

#[cfg(unix)]
use std::{thread::sleep, time::Duration};

#[cfg(unix)]
use nix::sys::signal::{Signal, kill};
#[cfg(unix)]
use nix::unistd::Pid;

use super::FaultKind;

/// Checks that this operating system supports the fault.
pub(super) fn check(kind: FaultKind) -> Result<(), String> {
    match kind {
        FaultKind::Kill
        | FaultKind::Segfault
        | FaultKind::Stop
        | FaultKind::Terminate
        | FaultKind::Interrupt
            if !cfg!(unix) =>
        {
            Err(format!("{kind} requires the signals of a Unix system"))
        }
        _ => Ok(()),
    }
}

/// Raises the signal or causes the fault. Returns if the process survives, because it handles the signal or because it
/// was continued after a stop.
#[cfg(unix)]
pub(super) fn raise(kind: FaultKind) -> Result<(), String> {
    let signal = match kind {
        FaultKind::Kill => Signal::SIGKILL,
        FaultKind::Stop => Signal::SIGSTOP,
        FaultKind::Terminate => Signal::SIGTERM,
        FaultKind::Interrupt => Signal::SIGINT,
        FaultKind::Segfault => write_to_unmapped_page(),
        other => return Err(format!("{other} is not a signal")),
    };
    kill(Pid::this(), signal).map_err(|error| std::io::Error::from(error).to_string())?;
    // Another thread may handle the signal. The call must not start before the handler has run.
    sleep(Duration::from_millis(20));
    Ok(())
}

/// Causes a real segmentation fault instead of raising the signal, so that signal handlers get the same information as
/// after an unintended fault.
#[cfg(unix)]
fn write_to_unmapped_page() -> Signal {
    // The first page is never mapped. A null pointer would be caught before the write.
    const UNMAPPED_ADDRESS: usize = 16;
    // SAFETY: unsound on purpose. No page is mapped at this address, so the write ends the process and no later code
    // runs. The write is volatile, so the compiler does not remove it or assume that it never happens.
    unsafe { std::ptr::without_provenance_mut::<u8>(UNMAPPED_ADDRESS).write_volatile(1) };
    Signal::SIGSEGV
}

/// Returns an error, because faults of the process are not supported on this system.
#[cfg(not(unix))]
pub(super) fn raise(kind: FaultKind) -> Result<(), String> {
    check(kind)
}
