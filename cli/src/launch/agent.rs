//! The agent of a rank: the process between the launcher and the rank. It starts the rank on its machine, forwards the
//! rank's output to the launcher and carries out the launcher's commands.
//!
//! The rank leads a process group with everything that it starts, so that a signal reaches all of it. When the
//! connection to the launcher closes, the agent kills the group: no rank outlives its launcher. An agent exits only when
//! the launcher releases it, because mpirun ends all ranks as soon as one of its own children exits.

use std::env;
use std::io::{self, Read};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::unix::process::CommandExt;
use std::process::{self, Child, Command, ExitCode, Stdio};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use burn_megatron::comm::Token;
use burn_megatron::comm::auth::client_handshake;
use libc::pid_t;

use super::args::AgentArgs;
use super::exit_status::RankExitStatus;
use super::protocol::{self, AGENT_SERVER_ADDRESS, MAX_PAYLOAD, OutputStream, PURPOSE, RELEASE};
use super::sys;
use crate::error::Error;

/// Timeout of connecting to the launcher, and of its handshake.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);

/// How long output is read after the rank has exited, if a process that it started keeps the pipe open.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);

/// Time between SIGTERM and SIGKILL when mpirun ends the ranks; shorter than the time after which it kills this process.
const KILL_DELAY: Duration = Duration::from_millis(700);

/// The variables that give the rank of a process, each with mpirun's name for it.
const RANK_VARIABLES: [(&str, &str); 4] = [
    ("RANK", "OMPI_COMM_WORLD_RANK"),
    ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"),
    ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
];

type Link = Arc<Mutex<TcpStream>>;

/// Runs one rank, whose number and launcher are in the environment.
pub fn run(args: &AgentArgs) -> Result<ExitCode, Error> {
    sys::block_termination_signals()?;
    let stream = connect()?;
    let commands = stream.try_clone()?;
    let link: Link = Arc::new(Mutex::new(stream));
    // It is waited for at the end only, so that its process id stays that of the group.
    let started = start(args);
    let group = started
        .as_ref()
        .map(|rank| ProcessGroup(rank.id() as pid_t));
    let group = group.unwrap_or(ProcessGroup(0));
    let (released, wait_for_release) = mpsc::channel();
    spawn_thread(move || group.handle_commands(commands, &released))?;
    spawn_thread(move || group.handle_signals())?;

    let status = match started {
        Ok(mut rank) => {
            let ended = forward_output(&mut rank, group, &link)?;
            let status = sys::wait_for_exited_child().map(|(_, status)| status);
            wait_for_output(&ended);
            status.unwrap_or_else(|| {
                RankExitStatus::Lost("the system does not report its exit status".into())
            })
        }
        Err(error) => {
            RankExitStatus::NotStarted(format!("{}: {error}", args.command[0].to_string_lossy()))
        }
    };
    if protocol::send_exit_status(&mut *lock(&link), &status).is_err() {
        group.end();
    }
    // The thread that handles commands either sends or ends this process.
    let _ = wait_for_release.recv();
    // Processes that the rank left behind are killed with it.
    group.signal(libc::SIGKILL);
    // The launcher knows the exit status of the rank. For an agent that fails, mpirun prints a long message.
    Ok(ExitCode::SUCCESS)
}

fn spawn_thread(work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    thread::Builder::new().spawn(work).map(drop)
}

fn connect() -> Result<TcpStream, Error> {
    let address = env::var(AGENT_SERVER_ADDRESS)
        .map_err(|_| format!("{AGENT_SERVER_ADDRESS} is not set: `launch` sets it"))?;
    let token = env::var(Token::VARIABLE);
    let token = token.map_err(|_| format!("{} is not set: `launch` sets it", Token::VARIABLE))?;
    let token = Token::parse(&token, Token::VARIABLE)?;
    let (own, of_mpirun) = RANK_VARIABLES[0];
    let rank = rank_variable(own, of_mpirun).ok_or("no variable gives the rank")?;
    let rank: usize = rank.parse()?;
    let unreachable =
        |error| format!("rank {rank} cannot connect to its launcher at {address}: {error}");
    let stream = connect_any(&address).map_err(unreachable)?;
    client_handshake(
        &stream,
        Some(&token),
        PURPOSE,
        &rank.to_string(),
        CONNECT_TIMEOUT,
    )?;
    sys::keep_alive(&stream)?;
    Ok(stream)
}

fn rank_variable(own: &str, of_mpirun: &str) -> Option<String> {
    env::var(of_mpirun).or_else(|_| env::var(own)).ok()
}

/// A connection to the first address of `host:port` that answers.
fn connect_any(address: &str) -> io::Result<TcpStream> {
    let mut connected = Err(io::ErrorKind::NotFound.into());
    for address in address.to_socket_addrs()? {
        connected = TcpStream::connect_timeout(&address, CONNECT_TIMEOUT);
        if connected.is_ok() {
            break;
        }
    }
    connected
}

fn start(args: &AgentArgs) -> io::Result<Child> {
    let words = args.command.split_first();
    let (program, arguments) = words.ok_or(io::ErrorKind::InvalidInput)?;
    // The same names under the launcher and under mpirun.
    let seat = RANK_VARIABLES
        .iter()
        .filter_map(|(own, of_mpirun)| Some((own, rank_variable(own, of_mpirun)?)));
    let mut command = Command::new(program);
    command
        .args(arguments)
        .env_remove(AGENT_SERVER_ADDRESS)
        .envs(seat)
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    sys::signal_on_parent_exit(&mut command, libc::SIGKILL);
    command.spawn()
}

/// Forwards both output streams of the rank, each in a thread; sends once for each that has ended.
fn forward_output(rank: &mut Child, group: ProcessGroup, link: &Link) -> io::Result<Receiver<()>> {
    let (done, ended) = mpsc::channel();
    let (out, err) = (rank.stdout.take(), rank.stderr.take());
    for (stream, from) in [
        (
            OutputStream::Stdout,
            out.map(|from| Box::new(from) as Box<dyn Read + Send>),
        ),
        (
            OutputStream::Stderr,
            err.map(|from| Box::new(from) as Box<dyn Read + Send>),
        ),
    ] {
        let (link, done) = (Arc::clone(link), done.clone());
        spawn_thread(move || {
            if let Some(from) = from
                && forward(from, stream, &link).is_err()
            {
                group.end();
            }
            // The receiver is gone if the rank exited longer ago than the drain timeout.
            let _ = done.send(());
        })?;
    }
    Ok(ended)
}

/// Forwards a stream until it ends.
///
/// # Errors
/// Sending to the launcher failed.
fn forward(mut from: impl Read, stream: OutputStream, link: &Link) -> io::Result<()> {
    let mut bytes = vec![0; MAX_PAYLOAD];
    loop {
        match from.read(&mut bytes) {
            Ok(0) => return Ok(()),
            Ok(len) => protocol::send_output(&mut *lock(link), stream, &bytes[..len])?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return Ok(()),
        }
    }
}

fn wait_for_output(ended: &Receiver<()>) {
    for _ in 0..2 {
        if ended.recv_timeout(DRAIN_TIMEOUT).is_err() {
            return;
        }
    }
}

fn lock(link: &Link) -> MutexGuard<'_, TcpStream> {
    link.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The process group of the rank; 0 if the rank could not be started.
#[derive(Clone, Copy)]
struct ProcessGroup(pid_t);

impl ProcessGroup {
    fn signal(self, signal: i32) {
        if self.0 != 0 {
            sys::kill(-self.0, signal);
        }
    }

    /// Carries out the launcher's commands; kills the group when the connection closes.
    fn handle_commands(self, mut commands: TcpStream, released: &Sender<()>) {
        let mut order = [0];
        while commands.read_exact(&mut order).is_ok() {
            match order[0] {
                RELEASE => {
                    // The receiver lives until the end of the process.
                    let _ = released.send(());
                    return;
                }
                signal => self.signal(i32::from(signal)),
            }
        }
        self.end();
    }

    /// Ends the rank when mpirun signals this process, as it does when a rank calls MPI_Abort.
    fn handle_signals(self) {
        while sys::wait_for_termination_signal().is_ok() {
            self.signal(libc::SIGTERM);
            thread::sleep(KILL_DELAY);
            self.signal(libc::SIGKILL);
        }
    }

    /// Kills the process group of the rank, and ends this process.
    fn end(self) -> ! {
        self.signal(libc::SIGKILL);
        process::exit(1);
    }
}
