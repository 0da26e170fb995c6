//! Faults that end a process, in a process of its own: this test's program, started again for one fault.

use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};

use super::*;

const FAULT: &str = "BURN_MEGATRON_TEST_FAULT";

fn child(fault: &str) -> Child {
    let name = "testing::fault_injection::tests::processes::as_a_child";
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
    // A shell starts jobs in the background with this signal ignored, and their children inherit that.
    // SAFETY: the default action has no handler.
    unsafe { libc::signal(libc::SIGINT, libc::SIG_DFL) };
    let solo: Arc<dyn Communicator> = Arc::new(crate::SingleRank::new("world"));
    let plan = FaultPlan::new(vec![fault.parse().unwrap()]);
    inject(solo, Arc::new(plan)).barrier().unwrap();
}

#[test]
fn a_process_ends_by_its_signal() {
    for (kind, signal) in [
        ("kill", libc::SIGKILL),
        ("abort", libc::SIGABRT),
        ("segfault", libc::SIGSEGV),
        ("terminate", libc::SIGTERM),
        ("interrupt", libc::SIGINT),
    ] {
        let status = child(&format!("{kind}@rank=0,call=0")).wait().unwrap();
        assert_eq!(status.signal(), Some(signal), "{kind}");
    }
    let status = child("error@rank=0,call=1").wait().unwrap();
    assert!(status.success(), "there is no second call");
}

#[test]
fn a_process_stops_until_it_is_told_to_go_on() {
    let mut child = child("stop@rank=0,call=0");
    let pid = libc::pid_t::try_from(child.id()).unwrap();
    let mut status = 0;
    // SAFETY: the process is a child that nobody else waits for, and the status is a local number.
    let stopped = unsafe { libc::waitpid(pid, &mut status, libc::WUNTRACED) };
    assert_eq!(stopped, pid);
    assert!(libc::WIFSTOPPED(status));
    assert_eq!(libc::WSTOPSIG(status), libc::SIGSTOP);
    // SAFETY: the same process, which has not been waited for to its end.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGCONT) }, 0);
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_rank_that_spins_never_returns() {
    let mut child = child("spin@rank=0,call=0");
    std::thread::sleep(Duration::from_millis(300));
    assert!(child.try_wait().unwrap().is_none());
    child.kill().unwrap();
    assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGKILL));
}
