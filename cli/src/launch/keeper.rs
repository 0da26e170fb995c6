//! The process between the launcher and a rank: it starts the rank, sends on what it writes, and is the
//! arm of the launcher on the rank's machine.
//!
//! The rank leads a process group with all that it starts, so that a signal reaches them together. When
//! the connection to the launcher ends, so does the group: no rank outlives its launcher. A keeper stays
//! until the launcher lets it go, as mpirun ends all ranks at once when one of its own children fails.

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
use burn_megatron::comm::auth::introduce;
use libc::pid_t;

use super::args::KeepArgs;
use super::ending::Ending;
use super::frame::{self, LEAVE, LINK, MAX_PAYLOAD, PURPOSE, Stream};
use super::sys;
use crate::recipe::Error;

/// How long the launcher may take to answer.
const REACH: Duration = Duration::from_secs(30);

/// How long the output is read on after the rank has ended, if something that it started keeps it open.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// From SIGTERM to SIGKILL when mpirun ends the ranks: sooner than it kills this process.
const BEFORE_MPIRUN: Duration = Duration::from_millis(700);

/// The variables that say which rank a process is, and mpirun's for the same.
const SEAT: [(&str, &str); 4] = [
    ("RANK", "OMPI_COMM_WORLD_RANK"),
    ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"),
    ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
];

type Link = Arc<Mutex<TcpStream>>;

/// Keeps one rank: its number and its launcher come from the environment.
pub fn run(args: &KeepArgs) -> Result<ExitCode, Error> {
    sys::hold_ending_signals()?;
    let stream = connect()?;
    let orders = stream.try_clone()?;
    let link: Link = Arc::new(Mutex::new(stream));
    // Until the end it is not waited for, so that its number stays that of the group.
    let started = start(args);
    let group = started.as_ref().map(|rank| Group(rank.id() as pid_t));
    let group = group.unwrap_or(Group(0));
    let (told, may_leave) = mpsc::channel();
    in_thread(move || group.obey(orders, &told))?;
    in_thread(move || group.obey_signals())?;

    let ending = match started {
        Ok(mut rank) => {
            let ended = send_on_output(&mut rank, group, &link)?;
            let ending = sys::next_ended_child().map(|(_, ending)| ending);
            await_ends(&ended);
            ending.unwrap_or_else(|| Ending::Lost("the system does not say how it ended".into()))
        }
        Err(error) => {
            Ending::Unstartable(format!("{}: {error}", args.command[0].to_string_lossy()))
        }
    };
    if frame::send_ending(&mut *lock(&link), &ending).is_err() {
        group.end();
    }
    // The thread that obeys either says so or ends this process.
    let _ = may_leave.recv();
    // What the rank has left behind goes with it.
    group.signal(libc::SIGKILL);
    // The launcher knows how the rank ended. Of a keeper that fails, mpirun would tell at length.
    Ok(ExitCode::SUCCESS)
}

fn in_thread(work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    thread::Builder::new().spawn(work).map(drop)
}

fn connect() -> Result<TcpStream, Error> {
    let address = env::var(LINK).map_err(|_| format!("{LINK} is not set: `launch` sets it"))?;
    let token = env::var(Token::VARIABLE);
    let token = token.map_err(|_| format!("{} is not set: `launch` sets it", Token::VARIABLE))?;
    let token = Token::parse(&token, Token::VARIABLE)?;
    let (own, of_mpirun) = SEAT[0];
    let rank = value(own, of_mpirun).ok_or("no variable gives the rank")?;
    let rank: usize = rank.parse()?;
    let unreachable =
        |error| format!("rank {rank} does not reach its launcher at {address}: {error}");
    let stream = reach(&address).map_err(unreachable)?;
    introduce(&stream, Some(&token), PURPOSE, &rank.to_string(), REACH)?;
    sys::keep_alive(&stream)?;
    Ok(stream)
}

fn value(own: &str, of_mpirun: &str) -> Option<String> {
    env::var(of_mpirun).or_else(|_| env::var(own)).ok()
}

/// A connection to the first address of `host:port` that answers.
fn reach(address: &str) -> io::Result<TcpStream> {
    let mut reached = Err(io::ErrorKind::NotFound.into());
    for address in address.to_socket_addrs()? {
        reached = TcpStream::connect_timeout(&address, REACH);
        if reached.is_ok() {
            break;
        }
    }
    reached
}

fn start(args: &KeepArgs) -> io::Result<Child> {
    let words = args.command.split_first();
    let (program, arguments) = words.ok_or(io::ErrorKind::InvalidInput)?;
    // Both ways they have the same names.
    let seat = SEAT
        .iter()
        .filter_map(|(own, of_mpirun)| Some((own, value(own, of_mpirun)?)));
    let mut command = Command::new(program);
    command
        .args(arguments)
        .env_remove(LINK)
        .envs(seat)
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    sys::end_with_parent(&mut command, libc::SIGKILL);
    command.spawn()
}

/// Sends on both streams of the rank; says once for each that it has ended.
fn send_on_output(rank: &mut Child, group: Group, link: &Link) -> io::Result<Receiver<()>> {
    let (done, ended) = mpsc::channel();
    let (out, err) = (rank.stdout.take(), rank.stderr.take());
    for (stream, from) in [
        (
            Stream::Out,
            out.map(|from| Box::new(from) as Box<dyn Read + Send>),
        ),
        (
            Stream::Err,
            err.map(|from| Box::new(from) as Box<dyn Read + Send>),
        ),
    ] {
        let (link, done) = (Arc::clone(link), done.clone());
        in_thread(move || {
            if let Some(from) = from
                && send_on(from, stream, &link).is_err()
            {
                group.end();
            }
            // Nobody listens any more if the rank ended long ago.
            let _ = done.send(());
        })?;
    }
    Ok(ended)
}

/// Sends on a stream until it ends; fails if the launcher does not take it.
fn send_on(mut from: impl Read, stream: Stream, link: &Link) -> io::Result<()> {
    let mut bytes = vec![0; MAX_PAYLOAD];
    loop {
        match from.read(&mut bytes) {
            Ok(0) => return Ok(()),
            Ok(len) => frame::send_output(&mut *lock(link), stream, &bytes[..len])?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return Ok(()),
        }
    }
}

fn await_ends(ended: &Receiver<()>) {
    for _ in 0..2 {
        if ended.recv_timeout(LAST_WORDS).is_err() {
            return;
        }
    }
}

fn lock(link: &Link) -> MutexGuard<'_, TcpStream> {
    link.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The process group of the rank; 0 if it could not be started.
#[derive(Clone, Copy)]
struct Group(pid_t);

impl Group {
    fn signal(self, signal: i32) {
        if self.0 != 0 {
            sys::kill(-self.0, signal);
        }
    }

    /// Carries out the launcher's orders, and ends everything when it is gone.
    fn obey(self, mut orders: TcpStream, told: &Sender<()>) {
        let mut order = [0];
        while orders.read_exact(&mut order).is_ok() {
            match order[0] {
                LEAVE => {
                    // Who waits for it is there until the end.
                    let _ = told.send(());
                    return;
                }
                signal => self.signal(i32::from(signal)),
            }
        }
        self.end();
    }

    /// Ends the rank when mpirun asks for it, as it does when a rank calls MPI_Abort.
    fn obey_signals(self) {
        while sys::next_ending_signal().is_ok() {
            self.signal(libc::SIGTERM);
            thread::sleep(BEFORE_MPIRUN);
            self.signal(libc::SIGKILL);
        }
    }

    /// Ends the rank, what it has started, and this process.
    fn end(self) -> ! {
        self.signal(libc::SIGKILL);
        process::exit(1);
    }
}
