//! The processes of the ranks: starts them, reads their output, reports how they exit, and signals them.

use std::ffi::OsString;
use std::io::{self, Read};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use super::error::LaunchError;
use super::exit_status::RankExitStatus;
use super::guard::Guard;
use super::output::{JobOutput, StreamOutput};
use super::slot::Variables;
use super::supervise::SupervisorEvent;
use super::sys;

/// The time that output is still read after the rank has exited, if one of its child processes keeps the pipe open.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);
/// Timeout for the system to end the remaining processes of a rank.
const KILL_TIMEOUT: Duration = Duration::from_secs(2);

/// Command of the ranks.
pub struct RankCommand {
    /// The program and its arguments.
    pub words: Vec<OsString>,
    /// The number of ranks.
    pub ranks: usize,
    /// The variables that are the same for all ranks.
    pub variables: Vec<(&'static str, String)>,
}

impl RankCommand {
    /// Returns the command of a rank with additional variables.
    fn of(&self, rank: usize, further: Variables) -> Command {
        let (rank, ranks) = (rank.to_string(), self.ranks.to_string());
        let mut command = Command::new(&self.words[0]);
        command
            .args(&self.words[1..])
            .envs(further)
            .envs(self.variables.iter().map(|(name, value)| (name, value)))
            .env("RANK", &rank)
            .env("WORLD_SIZE", &ranks)
            // All ranks are on this machine.
            .env("LOCAL_RANK", &rank)
            .env("LOCAL_WORLD_SIZE", &ranks);
        command
    }
}

/// Rank processes of a run. Each rank leads a process group. Exited ranks stay zombies until the end of the run, so
/// that their process ids are not reused.
pub struct RankProcesses {
    command: RankCommand,
    output: Arc<JobOutput>,
    events: Sender<SupervisorEvent>,
    guard: Guard,
    children: Vec<Child>,
    /// Each thread that reads output holds a sender, and drops it at the end of the output.
    readers: (Sender<()>, Receiver<()>),
}

impl RankProcesses {
    /// Creates the processes and starts the guard. No rank is started yet.
    pub fn new(
        command: RankCommand,
        output: JobOutput,
        events: Sender<SupervisorEvent>,
    ) -> Result<Self, LaunchError> {
        let guard = Guard::start().map_err(LaunchError::system("the guard cannot be started"))?;
        let (pid, tell) = (guard.pid(), events.clone());
        let watch = move || {
            // The receiver is dropped once the run is over.
            let _ = tell.send(SupervisorEvent::GuardExited(sys::wait_for_exit(pid)));
        };
        spawn_thread(watch).map_err(LaunchError::system("a thread cannot be started"))?;
        Ok(Self {
            command,
            output: Arc::new(output),
            events,
            guard,
            children: Vec::new(),
            readers: mpsc::channel(),
        })
    }

    /// Starts a rank with additional variables. A failure is reported as the exit of the rank. Call it on a thread
    /// that lives as long as the ranks.
    pub fn start(&mut self, rank: usize, variables: Variables) {
        let mut command = self.command.of(rank, variables);
        command
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        sys::signal_on_parent_exit(&mut command, Signal::SIGKILL);
        let program = self.command.words[0].to_string_lossy();
        let not_started =
            |error: io::Error| RankExitStatus::NotStarted(format!("{program}: {error}"));
        let spawned = command.spawn().map_err(not_started);
        let started = spawned.and_then(|child| {
            self.guard.add(sys::pid(&child));
            self.watch(rank, child)
                .map_err(|error| RankExitStatus::Lost(error.to_string()))
        });
        if let Err(status) = started {
            let _ = self.events.send(SupervisorEvent::RankExited(rank, status));
        }
    }

    /// Starts threads that read the output of a rank and wait for its exit.
    fn watch(&mut self, rank: usize, mut child: Child) -> io::Result<()> {
        let pid = sys::pid(&child);
        let pipes = (child.stdout.take(), child.stderr.take());
        self.children.push(child);
        let [out, err] = JobOutput::rank(&self.output, rank);
        let (open, ended) = mpsc::channel();
        self.read(pipes.0, out, open.clone())?;
        self.read(pipes.1, err, open)?;
        let events = self.events.clone();
        spawn_thread(move || {
            let status = sys::wait_for_exit(pid);
            // The channel is disconnected when both streams have ended.
            let _ = ended.recv_timeout(DRAIN_TIMEOUT);
            let _ = events.send(SupervisorEvent::RankExited(rank, status));
        })
    }

    fn read(
        &self,
        from: Option<impl Read + Send + 'static>,
        mut to: StreamOutput,
        open: Sender<()>,
    ) -> io::Result<()> {
        let Some(mut from) = from else { return Ok(()) };
        let open = (open, self.readers.0.clone());
        spawn_thread(move || {
            // A read error counts as the end of the pipe.
            let _ = io::copy(&mut from, &mut to);
            to.finish();
            drop(open);
        })
    }

    /// Sends a signal to every rank and its child processes.
    pub fn signal(&self, signal: Signal) {
        for child in &self.children {
            sys::signal_group(child, signal);
        }
    }

    /// Kills the remaining processes of the ranks, and prints the rest of their output.
    pub fn end(mut self) {
        self.signal(Signal::SIGKILL);
        self.guard.end();
        let until = Instant::now() + KILL_TIMEOUT;
        for child in &mut self.children {
            sys::wait_for_group(child, until);
        }
        drop(self.readers.0);
        let _ = self.readers.1.recv_timeout(DRAIN_TIMEOUT);
    }
}

/// Starts a thread with a small stack, which is enough for reading a pipe.
fn spawn_thread(work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let builder = thread::Builder::new().stack_size(256 << 10);
    builder.spawn(work).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_has_the_variables_of_its_slot_and_those_of_the_run() {
        let all = RankCommand {
            words: vec!["rank".into(), "-v".into()],
            ranks: 4,
            variables: vec![("BURN_MEGATRON_RENDEZVOUS", "127.0.0.1:99".into())],
        };
        let slot = vec![("PMIX".into(), "x".into()), ("RANK".into(), "7".into())];
        let command = all.of(2, slot);
        let value = |name: &str| {
            let mut variables = command.get_envs();
            let (_, value) = variables.find(|(known, _)| *known == name)?;
            value?.to_str().map(str::to_owned)
        };
        for (name, wanted) in [
            ("BURN_MEGATRON_RENDEZVOUS", "127.0.0.1:99"),
            ("PMIX", "x"),
            ("RANK", "2"),
            ("WORLD_SIZE", "4"),
            ("LOCAL_RANK", "2"),
            ("LOCAL_WORLD_SIZE", "4"),
        ] {
            assert_eq!(value(name).as_deref(), Some(wanted), "{name}");
        }
        assert_eq!(command.get_args().collect::<Vec<_>>(), ["-v"]);
    }
}
