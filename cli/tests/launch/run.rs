//! Runs launchers, and finds the processes that they start.

use std::fs;
use std::io::Read;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use burn_megatron_test_support::skipped_in_part;

const MARK: &str = "BURN_MEGATRON_LAUNCH_TEST";

/// Timeout for a run.
pub const DEADLINE: Duration = Duration::from_secs(120);

/// Program that starts the ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Way {
    Own,
    Mpirun,
}

impl Way {
    pub fn engine(self) -> &'static str {
        match self {
            Way::Own => "nccl",
            Way::Mpirun => "mpi",
        }
    }
}

pub const NO_MPIRUN: &str = "Open MPI's mpirun is not on PATH";

pub fn has_mpirun() -> bool {
    let probe = Command::new("mpirun").arg("--version").output();
    probe.is_ok_and(|said| String::from_utf8_lossy(&said.stdout).contains("Open MPI"))
}

/// Runs a test with both starters concurrently.
pub fn both_ways(test: fn(Way)) {
    let own = thread::spawn(move || test(Way::Own));
    if has_mpirun() {
        test(Way::Mpirun)
    } else {
        skipped_in_part(NO_MPIRUN)
    }
    own.join()
        .expect("the ranks that are children of the launcher");
}

/// Running launcher.
pub struct Run {
    child: Child,
    mark: String,
    out: Option<JoinHandle<Vec<u8>>>,
    err: Option<JoinHandle<Vec<u8>>>,
}

/// Result of a run.
pub struct Ended {
    pub status: ExitStatus,
    pub out: Vec<u8>,
    pub err: String,
}

pub fn launch_with(change: impl FnOnce(&mut Command), words: &[&str]) -> Run {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let mark = format!("{}-{count}", std::process::id());
    let mut command = Command::new(env!("CARGO_BIN_EXE_burn-megatron"));
    for name in [
        "RANK",
        "BURN_MEGATRON_RENDEZVOUS",
        "BURN_MEGATRON_TOKEN",
        "OMPI_COMM_WORLD_RANK",
    ] {
        command.env_remove(name);
    }
    command.arg("launch").args(words).env(MARK, &mark);
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    change(&mut command);
    let mut child = command.spawn().unwrap();
    Run {
        out: child.stdout.take().map(read),
        err: child.stderr.take().map(read),
        child,
        mark,
    }
}

/// Reads a stream in a thread, so that no writer blocks on a full pipe.
fn read(mut from: impl Read + Send + 'static) -> JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        from.read_to_end(&mut bytes).unwrap();
        bytes
    })
}

/// Launches a script on each rank. `$R` is the rank.
pub fn launch(way: Way, ranks: usize, flags: &[&str], script: &str) -> Run {
    let script = format!("R=${{OMPI_COMM_WORLD_RANK:-$RANK}}\n{script}");
    let ranks = ranks.to_string();
    let head = [
        "--ranks",
        &ranks,
        "--engine",
        way.engine(),
        "--program",
        "/bin/sh",
    ];
    let tail = ["--", "-c", &script];
    launch_with(|_| {}, &[&head, flags, &tail].concat())
}

impl Run {
    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Returns the processes of this run with their command lines.
    pub fn processes(&self) -> Vec<(i32, String)> {
        let wanted = format!("{MARK}={}", self.mark);
        let own = |entry: fs::DirEntry| {
            let process: i32 = entry.file_name().to_str()?.parse().ok()?;
            let environment = fs::read(entry.path().join("environ")).ok()?;
            let is_own = environment
                .split(|byte| *byte == 0)
                .any(|pair| pair == wanted.as_bytes());
            let called = fs::read(entry.path().join("cmdline")).ok()?;
            is_own.then(|| (process, String::from_utf8_lossy(&called).replace('\0', " ")))
        };
        fs::read_dir("/proc")
            .unwrap()
            .flatten()
            .filter_map(own)
            .collect()
    }

    /// Waits until `count` processes have a command line that starts with `text`. Returns these processes.
    #[track_caller]
    pub fn await_processes(&self, text: &str, count: usize) -> Vec<i32> {
        let mut found = Vec::new();
        until(|| {
            let all = self.processes().into_iter();
            found = all
                .filter(|(_, called)| called.starts_with(text))
                .map(|(process, _)| process)
                .collect();
            found.len() == count
        });
        found
    }

    pub fn signal(&self, signal: i32) {
        kill(self.pid(), signal);
    }

    /// Waits for the exit, and fails if a process is left.
    #[track_caller]
    pub fn end(self) -> Ended {
        let (ended, left) = self.end_with();
        assert!(left.is_empty(), "left running: {left:?}\n{}", ended.err);
        ended
    }

    #[track_caller]
    pub fn end_with(mut self) -> (Ended, Vec<(i32, String)>) {
        let began = Instant::now();
        let status = loop {
            match self.child.try_wait().unwrap() {
                Some(status) => break status,
                None if began.elapsed() > DEADLINE => {
                    for (process, _) in self.processes() {
                        kill(process, libc::SIGKILL);
                    }
                    panic!("the launcher did not end");
                }
                None => thread::sleep(Duration::from_millis(10)),
            }
        };
        let left = self.processes();
        let take =
            |thread: &mut Option<JoinHandle<Vec<u8>>>| thread.take().unwrap().join().unwrap();
        let ended = Ended {
            status,
            out: take(&mut self.out),
            err: String::from_utf8_lossy(&take(&mut self.err)).into_owned(),
        };
        (ended, left)
    }
}

impl Drop for Run {
    /// Kills the launcher if a test fails. Its guard then ends the other processes.
    fn drop(&mut self) {
        let _ = self.child.kill();
    }
}

impl Ended {
    pub fn out(&self) -> &str {
        std::str::from_utf8(&self.out).unwrap()
    }

    /// Returns the lines of standard output, sorted.
    pub fn sorted(&self) -> Vec<&str> {
        let mut lines: Vec<_> = self.out().lines().collect();
        lines.sort_unstable();
        lines
    }

    #[track_caller]
    pub fn code(&self, code: i32) {
        assert_eq!(
            self.status.code(),
            Some(code),
            "{}\n{}",
            self.out(),
            self.err
        );
    }

    /// Checks the last lines of standard error that are not prefixed with a rank, ignoring times.
    #[track_caller]
    pub fn summary(&self, lines: &[&str]) {
        let own = self.err.lines().filter(|line| !line.starts_with("[rank "));
        let found: Vec<_> = own.map(without_time).collect();
        assert!(
            found.ends_with(
                &lines
                    .iter()
                    .map(|line| line.to_string())
                    .collect::<Vec<_>>()
            ),
            "{}",
            self.err
        );
    }
}

/// Replaces the number in `rank 1 ended ... after 1.2 s`.
fn without_time(line: &str) -> String {
    match line.split_once(" after ") {
        Some((head, time)) if time.ends_with(" s") => format!("{head} after T s"),
        _ => line.to_owned(),
    }
}

pub fn kill(process: i32, signal: i32) {
    // SAFETY: the call has no pointers.
    unsafe { libc::kill(process, signal) };
}

#[track_caller]
pub fn until(mut condition: impl FnMut() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < DEADLINE, "it never came about");
        thread::sleep(Duration::from_millis(20));
    }
}
