//! System calls that the standard library does not offer.

use std::io;
use std::mem::MaybeUninit;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};

#[cfg(target_os = "linux")]
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{SigSet, Signal, kill, killpg};
use nix::unistd::Pid;

use super::exit_status::RankExitStatus;

/// The signals that ask a program to end.
const TERMINATION_SIGNALS: [Signal; 3] = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP];

fn termination_signals() -> SigSet {
    TERMINATION_SIGNALS.into_iter().collect()
}

/// Blocks SIGINT, SIGTERM and SIGHUP, which [`wait_for_termination_signal`] then receives, in this thread and the
/// threads that it starts.
pub fn block_termination_signals() -> io::Result<()> {
    Ok(termination_signals().thread_block()?)
}

/// Waits for SIGINT, SIGTERM or SIGHUP.
pub fn wait_for_termination_signal() -> io::Result<Signal> {
    Ok(termination_signals().wait()?)
}

/// Lets the process of `command` get `signal` when the thread that starts it exits (on Linux), and unblocks the
/// termination signals in it.
#[cfg_attr(not(target_os = "linux"), allow(unused_variables))]
pub fn signal_on_parent_exit(command: &mut Command, signal: Signal) {
    let launcher = Pid::this();
    let prepare = move || {
        termination_signals().thread_unblock()?;
        #[cfg(target_os = "linux")]
        {
            set_pdeathsig(signal)?;
            // The launcher may have exited already.
            if Pid::parent() != launcher {
                return Err(nix::Error::ESRCH.into());
            }
        }
        Ok(())
    };
    // SAFETY: the closure neither allocates nor takes a lock.
    unsafe { command.pre_exec(prepare) };
}

/// The process id of a child, which leads its process group.
pub fn pid(child: &Child) -> Pid {
    Pid::from_raw(child.id() as i32)
}

/// Sends a signal to a child. It is ignored if the child has exited.
pub fn signal_process(child: &Child, signal: Signal) {
    let _ = kill(pid(child), signal);
}

/// Sends a signal to a child and all processes of its group. It is ignored if the group is empty.
pub fn signal_group(child: &Child, signal: Signal) {
    let _ = killpg(pid(child), signal);
}

/// Lets this process get SIGKILL when its parent exits (on Linux).
pub fn die_with_parent() -> io::Result<()> {
    #[cfg(target_os = "linux")]
    set_pdeathsig(Signal::SIGKILL)?;
    Ok(())
}

/// Waits until a child has exited, and leaves it as a zombie, so that its process id is not reused.
pub fn wait_for_exit(child: Pid) -> RankExitStatus {
    loop {
        let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
        let options = libc::WEXITED | libc::WNOWAIT;
        // SAFETY: the pointer is valid. `nix` has this call on Linux only.
        let result = unsafe {
            let child = child.as_raw() as libc::id_t;
            libc::waitid(libc::P_PID, child, info.as_mut_ptr(), options)
        };
        match nix::Error::result(result) {
            Ok(_) => {
                // SAFETY: the call has filled it, for a child that has exited.
                let (code, status) = unsafe {
                    let info = info.assume_init();
                    (info.si_code, info.si_status())
                };
                return match code {
                    libc::CLD_EXITED => RankExitStatus::Code(status),
                    _ => RankExitStatus::Signal(status),
                };
            }
            Err(nix::Error::EINTR) => {}
            Err(error) => {
                let error = io::Error::from(error);
                return RankExitStatus::Lost(format!(
                    "the system does not report its exit status: {error}"
                ));
            }
        }
    }
}

/// Waits until nothing is left of the process group that a child leads, which was killed; at most until a time.
pub fn wait_for_group(child: &mut Child, until: Instant) {
    // A zombie is in the group too. An orphan is, until the system's first process has collected it.
    while matches!(child.try_wait(), Ok(None)) || killpg(pid(child), None).is_ok() {
        if Instant::now() >= until {
            return;
        }
        thread::sleep(Duration::from_millis(1));
    }
}
