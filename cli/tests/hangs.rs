//! Tests ranks as threads. The process exits even if a rank hangs outside of collectives. A run that does not fit
//! into memory is refused.
#![cfg(unix)]

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

/// Timeout for a process that exits on its own, even on a busy machine.
const PATIENCE: Duration = Duration::from_secs(240);

/// Starts two ranks. The second rank loops forever in its second step.
fn spinning(folder: &std::path::Path, flags: &[&str]) -> Child {
    let recipe = folder.join("recipe.toml");
    std::fs::write(
        &recipe,
        "[parallel]\ndata = 2\n[model]\nlayers = 1\nhidden = 16\ncontext = 16\n\
         [train]\nmicro_batch_size = 2\nglobal_batch_size = 4\nheld_out_samples = 4\n",
    )
    .unwrap();
    std::fs::write(
        folder.join("text.rs"),
        "fn number() -> usize { 1 }\n".repeat(200),
    )
    .unwrap();
    Command::new(env!("CARGO_BIN_EXE_burn-megatron"))
        .arg("pretrain")
        .arg("--recipe")
        .arg(recipe)
        .arg("--data")
        .arg(folder)
        .arg("--runs-dir")
        .arg(folder.join("runs"))
        .args([
            "--compute-threads",
            "1",
            "--inject",
            "spin@rank=1,step=2,call=0",
        ])
        .args(flags)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Waits for the exit of the process, and kills it on timeout.
fn code(mut child: Child) -> Option<i32> {
    let began = Instant::now();
    loop {
        match child.try_wait().unwrap() {
            Some(status) => return status.code(),
            None if began.elapsed() > PATIENCE => {
                child.kill().unwrap();
                child.wait().unwrap();
                panic!("it hangs");
            }
            None => sleep(Duration::from_millis(5)),
        }
    }
}

/// Returns the lines that the process writes to standard error.
fn lines(child: &mut Child) -> mpsc::Receiver<String> {
    let (send, lines) = mpsc::channel();
    let stderr = BufReader::new(child.stderr.take().unwrap());
    thread::spawn(move || {
        stderr
            .lines()
            .map_while(Result::ok)
            .try_for_each(|line| send.send(line))
    });
    lines
}

#[test]
fn at_the_deadline_the_report_is_printed_and_the_process_ends() {
    let folder = tempfile::tempdir().unwrap();
    let mut child = spinning(folder.path(), &["--timeout", "5"]);
    let lines = lines(&mut child);
    assert_eq!(code(child), Some(1));
    let said = lines.iter().collect::<Vec<_>>().join("\n");
    for says in [
        "error: rank 0 failed: deadline: after 5.",
        "rank 1 has not joined call",
        "call log: ",
        "still running after 5 s: rank 1 is past call",
    ] {
        assert!(said.contains(says), "{says}: {said}");
    }
}

#[test]
fn one_signal_ends_the_process_within_the_grace() {
    for signal in [libc::SIGTERM, libc::SIGINT] {
        let folder = tempfile::tempdir().unwrap();
        let mut child = spinning(folder.path(), &["--timeout", "100000", "--grace", "0.5"]);
        let lines = lines(&mut child);
        let strikes = |line: &str| line.contains("triggers on rank 1");
        let mut before = vec![];
        while !before.last().is_some_and(|line: &String| strikes(line)) {
            let line = lines.recv_timeout(PATIENCE);
            before.push(line.unwrap_or_else(|error| panic!("{error}: {before:?}")));
        }
        let pid = libc::pid_t::try_from(child.id()).unwrap();
        // SAFETY: the process is a child that was not waited for, so its process id is not reused.
        assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
        assert_eq!(code(child), Some(130));
        let said = lines.iter().collect::<Vec<_>>().join("\n");
        assert!(said.contains("interrupted: finishing this step"), "{said}");
        assert!(
            said.contains("interrupted: the ranks did not stop within"),
            "{said}"
        );
    }
}

/// Checks that a model that fits on no machine is refused with one line, before a run folder is created.
#[cfg(target_os = "linux")]
#[test]
fn a_model_that_does_not_fit_is_refused_before_anything_is_made() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = folder.path().join("recipe.toml");
    let runs = folder.path().join("runs");
    std::fs::write(
        &recipe,
        "[parallel]\ndata = 1\n[model]\nhidden = 1048576\nheads = 1024\nlayers = 40\n",
    )
    .unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_burn-megatron"))
        .arg("pretrain")
        .arg("--recipe")
        .arg(&recipe)
        .arg("--runs-dir")
        .arg(&runs)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.starts_with("error: the run needs at least "), "{said}");
    assert!(
        said.ends_with("; --ignore-memory skips this check\n"),
        "{said}"
    );
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(!runs.exists());
}

/// Checks that a run with --ignore-memory starts, and prints the memory estimate first. A limit on the process ends
/// it here, not the memory of the machine.
#[cfg(target_os = "linux")]
#[test]
fn the_header_comes_before_the_model() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = folder.path().join("recipe.toml");
    std::fs::write(
        folder.path().join("text.rs"),
        "fn number() -> usize { 1 }\n".repeat(200),
    )
    .unwrap();
    std::fs::write(
        &recipe,
        "[parallel]\ndata = 1\n[model]\nhidden = 1048576\nheads = 1024\nlayers = 40\n",
    )
    .unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_burn-megatron"));
    command
        .args([
            "pretrain",
            "--ignore-memory",
            "--compute-threads",
            "1",
            "--recipe",
        ])
        .arg(&recipe)
        .arg("--data")
        .arg(folder.path())
        .arg("--runs-dir")
        .arg(folder.path().join("runs"));
    let limit = libc::rlimit {
        rlim_cur: 3 << 29,
        rlim_max: 3 << 29,
    };
    let limits = move || {
        // SAFETY: the limit is a local value, and the call is allowed between fork and exec.
        match unsafe { libc::setrlimit(libc::RLIMIT_AS, &limit) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    };
    // SAFETY: the closure neither allocates nor takes a lock.
    unsafe { std::os::unix::process::CommandExt::pre_exec(&mut command, limits) };
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(!output.status.success(), "{said}");
    for says in ["model    40 layers, hidden 1048576", "\nmemory   "] {
        assert!(said.contains(says), "{says}: {said}");
    }
}
