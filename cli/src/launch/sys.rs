//! System calls that the standard library does not offer.

use std::io;
use std::mem::MaybeUninit;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

use libc::{c_int, pid_t};

use super::exit_status::RankExitStatus;

/// The signals that ask a program to end.
const TERMINATION_SIGNALS: [c_int; 3] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];

fn check(result: c_int) -> io::Result<c_int> {
    match result {
        -1 => Err(io::Error::last_os_error()),
        other => Ok(other),
    }
}

fn termination_signals() -> libc::sigset_t {
    let mut set = MaybeUninit::uninit();
    // SAFETY: the set is initialised by the first call; the signals are valid.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        let mut set = set.assume_init();
        for signal in TERMINATION_SIGNALS {
            libc::sigaddset(&mut set, signal);
        }
        set
    }
}

fn mask(how: c_int) -> io::Result<()> {
    // SAFETY: the set is valid, and no old one is asked for.
    match unsafe { libc::pthread_sigmask(how, &termination_signals(), std::ptr::null_mut()) } {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

/// Blocks SIGINT, SIGTERM and SIGHUP, which [`wait_for_termination_signal`] then receives, in this thread and the
/// threads that it starts.
pub fn block_termination_signals() -> io::Result<()> {
    mask(libc::SIG_BLOCK)
}

/// Waits for SIGINT, SIGTERM or SIGHUP.
pub fn wait_for_termination_signal() -> io::Result<i32> {
    let mut signal = 0;
    // SAFETY: both pointers are valid.
    match unsafe { libc::sigwait(&termination_signals(), &mut signal) } {
        0 => Ok(signal),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

/// Lets the process of `command` get `signal` when the thread that starts it exits (on Linux), and unblocks the
/// termination signals in it.
pub fn signal_on_parent_exit(command: &mut Command, signal: c_int) {
    let parent = std::process::id() as pid_t;
    let prepare = move || {
        mask(libc::SIG_UNBLOCK)?;
        #[cfg(target_os = "linux")]
        // SAFETY: both calls may be made between fork and exec.
        unsafe {
            check(libc::prctl(libc::PR_SET_PDEATHSIG, signal))?;
            // The parent may have exited already.
            if libc::getppid() != parent {
                return Err(io::Error::from_raw_os_error(libc::ESRCH));
            }
        }
        #[cfg(not(target_os = "linux"))]
        let _ = (parent, signal);
        Ok(())
    };
    // SAFETY: the closure neither allocates nor takes a lock.
    unsafe { command.pre_exec(prepare) };
}

/// Sends a signal to a process, or to a group if the number is negative. It is ignored if there is no such process.
pub fn kill(process: pid_t, signal: c_int) {
    // SAFETY: no pointers.
    unsafe { libc::kill(process, signal) };
}

/// Lets this process get SIGKILL when its parent exits (on Linux).
pub fn die_with_parent() -> io::Result<()> {
    #[cfg(target_os = "linux")]
    // SAFETY: no pointers.
    check(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) })?;
    Ok(())
}

/// Waits until a child has exited, and leaves it as a zombie, so that its process id is not reused.
pub fn wait_for_exit(child: pid_t) -> RankExitStatus {
    loop {
        let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
        let options = libc::WEXITED | libc::WNOWAIT;
        // SAFETY: the pointer is valid; the call fills it when it succeeds.
        let result =
            unsafe { libc::waitid(libc::P_PID, child as libc::id_t, info.as_mut_ptr(), options) };
        match check(result) {
            Ok(_) => {
                // SAFETY: filled by the call, for a child.
                let info = unsafe { info.assume_init() };
                let status = unsafe { info.si_status() };
                return match info.si_code {
                    libc::CLD_EXITED => RankExitStatus::Code(status),
                    _ => RankExitStatus::Signal(status),
                };
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => {
                return RankExitStatus::Lost(format!(
                    "the system does not report its exit status: {error}"
                ));
            }
        }
    }
}

/// Waits until a child has exited, at most until a time.
pub fn wait_until(child: &mut Child, until: Instant) -> Option<ExitStatus> {
    loop {
        match child.try_wait() {
            Ok(None) if Instant::now() < until => thread::sleep(Duration::from_millis(2)),
            Ok(status) => return status,
            Err(_) => return None,
        }
    }
}

/// Waits until nothing is left of the process group that a child leads, which was killed; at most until a time.
pub fn wait_for_group(child: &mut Child, until: Instant) {
    let group = -(child.id() as pid_t);
    // A zombie is in the group too. An orphan is, until the system's first process has collected it.
    while matches!(child.try_wait(), Ok(None)) || exists(group) {
        if Instant::now() >= until {
            return;
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// Whether there is a process, or a group if the number is negative.
fn exists(process: pid_t) -> bool {
    // SAFETY: no pointers.
    unsafe { libc::kill(process, 0) == 0 }
}

/// Whether this process runs as root.
pub fn is_root() -> bool {
    // SAFETY: no pointers.
    unsafe { libc::geteuid() == 0 }
}

/// Raises the limit of open files as far as this process may: each rank needs up to three.
pub fn raise_open_files() {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the pointers are valid. If the limit cannot be raised, opening files fails with an error.
    unsafe {
        if libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) == 0
            && let Some(raised) = raised(&limit)
        {
            limit.rlim_cur = raised;
            libc::setrlimit(libc::RLIMIT_NOFILE, &limit);
        }
    }
}

/// The value that a limit is raised to; `None` if it is high enough.
fn raised(limit: &libc::rlimit) -> Option<libc::rlim_t> {
    let wanted = limit.rlim_max.min(1 << 16);
    (limit.rlim_cur < wanted).then_some(wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_raised_and_never_lowered() {
        let of = |rlim_cur, rlim_max| raised(&libc::rlimit { rlim_cur, rlim_max });
        let infinite = libc::RLIM_INFINITY;
        assert_eq!(of(1024, 4096), Some(4096));
        assert_eq!(of(1024, infinite), Some(1 << 16));
        assert_eq!(of(4096, 4096), None);
        assert_eq!(of(1 << 20, 1 << 20), None);
        assert_eq!(of(1 << 20, infinite), None);
        assert_eq!(of(infinite, infinite), None);
    }
}
