//! System calls that are missing in the standard library.

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

/// Blocks SIGINT, SIGTERM and SIGHUP in this thread and the threads that it starts. [`wait_for_termination_signal`]
/// then receives them.
pub fn block_termination_signals() -> io::Result<()> {
    Ok(termination_signals().thread_block()?)
}

/// Waits for SIGINT, SIGTERM or SIGHUP.
pub fn wait_for_termination_signal() -> io::Result<Signal> {
    Ok(termination_signals().wait()?)
}

/// Configures `command` so that its process gets `signal` when the thread that starts it exits (on Linux). Also
/// unblocks the termination signals in the process.
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

/// Returns the process id of a child, which leads its process group.
pub fn pid(child: &Child) -> Pid {
    Pid::from_raw(child.id() as i32)
}

/// Sends a signal to a child. The signal is ignored if the child has exited.
pub fn signal_process(child: &Child, signal: Signal) {
    let _ = kill(pid(child), signal);
}

/// Sends a signal to all processes in the group of a child. The signal is ignored if the group is empty.
pub fn signal_group(child: &Child, signal: Signal) {
    let _ = killpg(pid(child), signal);
}

/// Makes the system send SIGKILL to this process when its parent exits (on Linux).
pub fn die_with_parent() -> io::Result<()> {
    #[cfg(target_os = "linux")]
    set_pdeathsig(Signal::SIGKILL)?;
    Ok(())
}

/// Waits until a child has exited. The child stays a zombie, so that its process id is not reused.
pub fn wait_for_exit(child: Pid) -> RankExitStatus {
    loop {
        let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
        let options = libc::WEXITED | libc::WNOWAIT;
        // SAFETY: the pointer is valid. `nix` supports this call on Linux only.
        let result = unsafe {
            let child = child.as_raw() as libc::id_t;
            libc::waitid(libc::P_PID, child, info.as_mut_ptr(), options)
        };
        match nix::Error::result(result) {
            Ok(_) => {
                // SAFETY: the call has initialized `info`, for a child that has exited.
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

/// Waits until the process group of a child is empty, at most until the time `until`. The group must have been killed
/// before.
pub fn wait_for_group(child: &mut Child, until: Instant) {
    // A zombie belongs to the group too. So does an orphan, until the init process has collected it.
    while matches!(child.try_wait(), Ok(None)) || killpg(pid(child), None).is_ok() {
        if Instant::now() >= until {
            return;
        }
        thread::sleep(Duration::from_millis(1));
    }
}
