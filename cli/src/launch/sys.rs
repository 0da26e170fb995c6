//! System calls that the standard library does not offer.

use std::io;
use std::mem::MaybeUninit;
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::Command;

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

/// Waits until a child has exited, and leaves it as a zombie, so that its process id is not reused. `None` once there
/// are no children.
pub fn wait_for_exited_child() -> Option<(u32, RankExitStatus)> {
    loop {
        let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
        let options = libc::WEXITED | libc::WNOWAIT;
        // SAFETY: the pointer is valid; the call fills it when it succeeds.
        let result = check(unsafe { libc::waitid(libc::P_ALL, 0, info.as_mut_ptr(), options) });
        match result {
            Ok(_) => {
                // SAFETY: filled by the call, for a child.
                let info = unsafe { info.assume_init() };
                let (process, status) = unsafe { (info.si_pid(), info.si_status()) };
                let status = match info.si_code {
                    libc::CLD_EXITED => RankExitStatus::Code(status),
                    _ => RankExitStatus::Signal(status),
                };
                return Some((u32::try_from(process).ok()?, status));
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return None,
        }
    }
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

/// Closes the connection if the peer's machine does not answer for 20 s, whether data is in flight or not: a cut link
/// alone does not close a connection.
pub fn keep_alive(stream: &TcpStream) -> io::Result<()> {
    set_option(stream, libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1)?;
    #[cfg(target_os = "linux")]
    for (option, value) in [
        (libc::TCP_KEEPIDLE, 5),
        (libc::TCP_KEEPINTVL, 5),
        // In milliseconds; it takes the place of a number of probes.
        (libc::TCP_USER_TIMEOUT, 20_000),
    ] {
        set_option(stream, libc::IPPROTO_TCP, option, value)?;
    }
    stream.set_nodelay(true)
}

fn set_option(stream: &TcpStream, level: c_int, option: c_int, value: c_int) -> io::Result<()> {
    let size = size_of::<c_int>() as libc::socklen_t;
    // SAFETY: the descriptor is open, and the pointer is valid for `size` bytes.
    let result = unsafe {
        libc::setsockopt(
            stream.as_raw_fd(),
            level,
            option,
            (&raw const value).cast(),
            size,
        )
    };
    check(result).map(drop)
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
