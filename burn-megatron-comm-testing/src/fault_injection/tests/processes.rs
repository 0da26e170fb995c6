//! Tests of faults that end a process. Each fault runs in a separate process, which executes this test program again.

use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};

use nix::sys::signal::{SigHandler, Signal, kill, signal};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use super::*;

const FAULT: &str = "BURN_MEGATRON_TEST_FAULT";

fn child(fault: &str) -> Child {
    let name = "fault_injection::tests::processes::as_a_child";
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--ignored"])
        .env(FAULT, fault)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

#[test]
#[ignore = "it is the other process, which a fault ends"]
fn as_a_child() {
    let Ok(fault) = std::env::var(FAULT) else {
        return;
    };
    // A shell starts background jobs with this signal ignored, and child processes inherit the setting.
    // SAFETY: the default action installs no handler.
    unsafe { signal(Signal::SIGINT, SigHandler::SigDfl) }.unwrap();
    let solo: Arc<dyn Communicator> = Arc::new(SingleRank::new("world"));
    let plan = FaultPlan::new(vec![fault.parse().unwrap()]);
    inject(solo, Arc::new(plan)).barrier().unwrap();
}

#[test]
fn a_process_ends_by_its_signal() {
    for (kind, signal) in [
        ("kill", Signal::SIGKILL),
        ("abort", Signal::SIGABRT),
        ("segfault", Signal::SIGSEGV),
        ("terminate", Signal::SIGTERM),
        ("interrupt", Signal::SIGINT),
    ] {
        let status = child(&format!("{kind}@rank=0,call=0")).wait().unwrap();
        assert_eq!(status.signal(), Some(signal as i32), "{kind}");
    }
    let status = child("error@rank=0,call=1").wait().unwrap();
    assert!(status.success(), "there is no second call");
}

#[test]
fn a_process_stops_until_it_is_told_to_go_on() {
    let mut child = child("stop@rank=0,call=0");
    let pid = Pid::from_raw(child.id() as i32);
    let stopped = waitpid(pid, Some(WaitPidFlag::WUNTRACED));
    assert_eq!(stopped, Ok(WaitStatus::Stopped(pid, Signal::SIGSTOP)));
    kill(pid, Signal::SIGCONT).unwrap();
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_rank_that_spins_never_returns() {
    let mut child = child("spin@rank=0,call=0");
    std::thread::sleep(Duration::from_millis(300));
    assert!(child.try_wait().unwrap().is_none());
    child.kill().unwrap();
    assert_eq!(child.wait().unwrap().signal(), Some(Signal::SIGKILL as i32));
}
