//! The command line and the process of Open MPI's mpirun.

use std::collections::HashMap;
use std::env;
use std::io;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::{Duration, Instant};

use burn_megatron::comm::probe;
use nix::sys::signal::Signal;
use nix::unistd::geteuid;

use super::error::LaunchError;
use super::mpirun_messages::MpirunMessages;
use super::slot::{self, Slot, SlotListener, Variables};
use super::supervise::SupervisorEvent;
use super::{program, sys};

/// The hidden command that runs a slot.
const SLOT_COMMAND: &str = "launch-slot";

/// Returns the path of mpirun: the given path, or the mpirun on PATH. It must be Open MPI's.
pub fn find(path: Option<&Path>) -> Result<PathBuf, LaunchError> {
    let path = match path {
        Some(path) => program::find(path)?,
        None => probe::program_on_path("mpirun").ok_or(LaunchError::NoMpirun)?,
    };
    match probe::program_version(&path) {
        Ok(version) if version.contains("Open MPI") => Ok(path),
        Ok(said) | Err(said) => Err(LaunchError::OtherMpirun { path, said }),
    }
}

/// Splits a line into words like a shell.
pub fn words(line: &str) -> Result<Vec<String>, LaunchError> {
    shell_words::split(line).map_err(|_| LaunchError::Quote(line.to_owned()))
}

/// Returns the mpirun command that starts a slot for each rank.
pub fn command(
    mpirun: &Path,
    arguments: &[String],
    ranks: usize,
    socket: &Path,
) -> Result<Command, LaunchError> {
    let own = env::current_exe().map_err(LaunchError::system(
        "the path of this program cannot be found",
    ))?;
    let mut command = Command::new(mpirun);
    command
        .args(["-n", &ranks.to_string(), "--oversubscribe"])
        .args(["--bind-to", "none", "-x", slot::SOCKET])
        .env(slot::SOCKET, socket)
        // Aggregated messages can be lost if the failing rank exits at once.
        .env("OMPI_MCA_orte_base_help_aggregate", "0");
    if geteuid().is_root() {
        command.env("OMPI_ALLOW_RUN_AS_ROOT", "1");
        command.env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    }
    command.args(arguments).arg(own).arg(SLOT_COMMAND);
    Ok(command)
}

/// Running mpirun process with the slots of the ranks.
pub struct Mpirun {
    child: Child,
    /// The channel of new slots, or `None` after the release of the slots. Without it, a slot exits as soon as it
    /// connects.
    slots: Option<Receiver<Slot>>,
    /// The received slots, by rank.
    received: HashMap<usize, Slot>,
    /// The connections to the slots of ranks that were started.
    connections: Vec<UnixStream>,
    messages: MpirunMessages,
}

impl Mpirun {
    /// Starts mpirun. Call it on a thread that lives as long as the ranks.
    pub fn start(
        path: &Path,
        arguments: &[String],
        ranks: usize,
        events: Sender<SupervisorEvent>,
    ) -> Result<Self, LaunchError> {
        let failed = LaunchError::system;
        let listener = SlotListener::open().map_err(failed(
            "a socket for mpirun's processes cannot be opened in the temporary folder",
        ))?;
        let mut command = command(path, arguments, ranks, &listener.path())?;
        command
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        sys::signal_on_parent_exit(&mut command, Signal::SIGTERM);
        let mut child = command
            .spawn()
            .map_err(failed("mpirun cannot be started"))?;
        let (send, slots) = mpsc::channel();
        let ready = events.clone();
        let on_slot = move |slot: Slot| {
            let rank = slot.rank;
            // The receivers are dropped once the run is over.
            let _ = send.send(slot);
            let _ = ready.send(SupervisorEvent::RankReady(rank));
        };
        let thread = failed("a thread cannot be started");
        listener.accept(ranks, on_slot).map_err(thread)?;
        let messages = MpirunMessages::default();
        watch(&mut child, &messages, events).map_err(failed("a thread cannot be started"))?;
        Ok(Self {
            child,
            slots: Some(slots),
            received: HashMap::new(),
            connections: Vec::new(),
            messages,
        })
    }

    /// Returns the variables of a rank whose slot has connected.
    pub fn variables(&mut self, rank: usize) -> Variables {
        let slots = self.slots.iter().flat_map(Receiver::try_iter);
        self.received.extend(slots.map(|slot| (slot.rank, slot)));
        let slot = self.received.remove(&rank);
        slot.map_or_else(Vec::new, |slot| {
            self.connections.push(slot.connection);
            slot.variables
        })
    }

    /// Releases the slots, so that they exit and mpirun exits after them.
    pub fn release(&mut self) {
        self.slots = None;
        self.received.clear();
        self.connections.clear();
    }

    /// Sends a signal to mpirun. After SIGTERM, mpirun ends its children, which takes a second or two.
    pub fn signal(&self, signal: Signal) {
        sys::signal_process(&self.child, signal);
    }

    /// Waits until mpirun has exited, for at most one second.
    pub fn end(mut self) {
        let until = Instant::now() + Duration::from_secs(1);
        sys::wait_for_group(&mut self.child, until);
    }

    /// Prints the messages that were held back, if nothing else explains the failure.
    pub fn show_messages(&self) {
        self.messages.show();
    }
}

/// Starts threads that read the output of mpirun and wait for its exit.
fn watch(
    child: &mut Child,
    messages: &MpirunMessages,
    events: Sender<SupervisorEvent>,
) -> io::Result<()> {
    let pid = sys::pid(child);
    let readers = [
        messages.read_in_thread(child.stdout.take())?,
        messages.read_in_thread(child.stderr.take())?,
    ];
    let wait = move || {
        let status = sys::wait_for_exit(pid);
        for reader in readers.into_iter().flatten() {
            // Wait for the end of the output.
            let _ = reader.join();
        }
        let _ = events.send(SupervisorEvent::StarterExited(status));
    };
    thread::Builder::new().spawn(wait).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsStr;

    #[test]
    fn mpirun_starts_a_slot_for_each_rank() {
        let arguments = ["-q".to_owned()];
        let socket = Path::new("/tmp/s");
        let command = command(Path::new("mpirun"), &arguments, 4, socket).unwrap();
        let words: Vec<_> = command
            .get_args()
            .map(|word| word.to_str().unwrap())
            .collect();
        let head = "-n 4 --oversubscribe --bind-to none -x BURN_MEGATRON_LAUNCH_LINK -q";
        assert_eq!(words[..8].join(" "), head);
        assert_eq!(words[9..], ["launch-slot"]);
        let sets = |(name, value): (&OsStr, Option<&OsStr>)| {
            name == slot::SOCKET && value == Some(socket.as_os_str())
        };
        assert!(command.get_envs().any(sets));
    }

    #[test]
    fn arguments_are_split_as_a_shell_does() {
        assert_eq!(
            words("--mca  btl 'tcp, self' -x A=\"b c\"d ''").unwrap(),
            ["--mca", "btl", "tcp, self", "-x", "A=b cd", ""]
        );
        assert!(words(" ").unwrap().is_empty());
        let error = words("-x 'A").unwrap_err();
        insta::assert_snapshot!(error, @"--mpirun-args \"-x 'A\": a quote is not closed");
    }
}
