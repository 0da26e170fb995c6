//! Starts real processes for the tests, and finds leftover processes.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};

/// The variable that identifies the processes of a test. All processes of the test inherit it.
const MARK: &str = "BURN_MEGATRON_TEST_MARK";

/// The command under test.
pub const PROGRAM: &str = env!("CARGO_BIN_EXE_burn-megatron");

/// A recipe that trains fast: two layers, with dropout, for four and more ranks.
const RECIPE: &str = r#"
[parallel]
data = 1

[model]
family = "gpt2"
layers = 2
hidden = 32
heads = 4
context = 16
dropout = 0.1

[train]
micro_batch_size = 2
global_batch_size = 8
held_out_samples = 8
steps = 6
learning_rate = 1e-3
warmup_steps = 2

[sample]
prompt = "fn"
tokens = 4
"#;

/// Temporary folder of a test, which is removed on drop, and the tag of its processes. Only one stage exists at a
/// time, because the tests measure times and have more processes than the machine has cores.
pub struct Stage {
    folder: PathBuf,
    mark: String,
    /// The data of [`pretrain`](Self::pretrain).
    pub data: String,
    _alone: MutexGuard<'static, ()>,
}

static ALONE: Mutex<()> = Mutex::new(());

impl Stage {
    pub fn new(name: &str) -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let mark = format!("{name}-{}-{number}", std::process::id());
        let folder = std::env::temp_dir().join(format!("burn-megatron-{mark}"));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("recipe.toml"), RECIPE).unwrap();
        let _alone = ALONE.lock();
        Self {
            folder,
            mark,
            data: concat!(env!("CARGO_MANIFEST_DIR"), "/src").into(),
            _alone,
        }
    }

    pub fn path(&self) -> &Path {
        &self.folder
    }

    /// Returns a command whose processes have the tag of this test.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command
            .env(MARK, &self.mark)
            // A backtrace of an unoptimized binary takes seconds.
            .env("RUST_BACKTRACE", "0")
            .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
            .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
            .current_dir(&self.folder)
            .stdin(Stdio::null());
        command
    }

    /// Returns an `mpirun` command with `ranks` ranks of the command under test.
    pub fn mpirun(&self, ranks: usize) -> Command {
        let mut command = self.command("mpirun");
        command.args(["--oversubscribe", "--bind-to", "none", "-x", MARK, "-n"]);
        command.arg(ranks.to_string()).arg(PROGRAM);
        command
    }

    /// Returns a launcher command with `ranks` ranks.
    pub fn launch(&self, ranks: usize) -> Command {
        let mut command = self.command(PROGRAM);
        command.args(["launch", "--ranks", &ranks.to_string(), "--"]);
        command
    }

    /// Adds the arguments of `pretrain` with the small recipe and the run folder `run`.
    pub fn pretrain<'a>(&self, command: &'a mut Command, run: &str) -> &'a mut Command {
        command.args(["pretrain", "--recipe", "recipe.toml", "--data", &self.data]);
        command.args(["--run-dir", run])
    }

    pub fn read(&self, file: &str) -> String {
        let path = self.folder.join(file);
        fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    }

    /// Returns the running processes of this test, with their command lines.
    pub fn living(&self) -> Vec<(u32, String)> {
        let mark = format!("{MARK}={}", self.mark);
        let entries = fs::read_dir("/proc").unwrap().flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        let mut found = vec![];
        for pid in pids {
            let read = |file: &str| fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
            let environment = read("environ");
            let stat = String::from_utf8_lossy(&read("stat")).into_owned();
            // A zombie does not count as running.
            let is_dead = stat
                .rsplit(')')
                .next()
                .is_some_and(|rest| rest.trim().starts_with('Z'));
            let marked = environment
                .split(|byte| *byte == 0)
                .any(|v| v == mark.as_bytes());
            if marked && !is_dead {
                let command = String::from_utf8_lossy(&read("cmdline")).replace('\0', " ");
                found.push((pid, command));
            }
        }
        found
    }

    /// Fails if a process of this test does not end.
    pub fn expect_nothing_left(&self) {
        let until = Instant::now() + Duration::from_secs(60);
        loop {
            let living = self.living();
            if living.is_empty() {
                return;
            }
            assert!(
                Instant::now() < until,
                "these are left running: {living:#?}"
            );
            sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        for (pid, _) in self.living() {
            let _ = Command::new("kill").args(["-9", &pid.to_string()]).status();
        }
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// Result of a command.
pub struct Ended {
    pub code: Option<i32>,
    pub output: String,
    pub errors: String,
    pub took: Duration,
}

impl Ended {
    /// Returns all output, for messages.
    pub fn all(&self) -> String {
        format!("code {:?}\n{}\n{}", self.code, self.output, self.errors)
    }
}

/// Runs a command with a timeout.
pub fn run(command: &mut Command, patience: Duration) -> Ended {
    let began = Instant::now();
    let child = start(command);
    let ended = end(child, patience);
    Ended {
        took: began.elapsed(),
        ..ended
    }
}

/// Starts a command with captured output.
pub fn start(command: &mut Command) -> Child {
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let program = command.get_program().to_owned();
    command
        .spawn()
        .unwrap_or_else(|error| panic!("{program:?} cannot be started: {error}"))
}

/// Waits for a command, and fails on timeout.
pub fn end(child: Child, patience: Duration) -> Ended {
    let pid = child.id();
    let began = Instant::now();
    let (done, finished) = std::sync::mpsc::channel::<()>();
    let watch = std::thread::spawn(move || {
        let late = finished.recv_timeout(patience).is_err();
        if late {
            let _ = Command::new("kill").args(["-9", &pid.to_string()]).status();
        }
        late
    });
    let Output {
        status,
        stdout,
        stderr,
    } = child.wait_with_output().unwrap();
    let _ = done.send(());
    let ended = Ended {
        code: status.code(),
        output: String::from_utf8_lossy(&stdout).into_owned(),
        errors: String::from_utf8_lossy(&stderr).into_owned(),
        took: began.elapsed(),
    };
    assert!(
        !watch.join().unwrap(),
        "it took longer than {patience:?}:\n{}",
        ended.all()
    );
    ended
}
