//! The server to which the agents of all ranks connect: it receives their output and sends them commands.

use std::io::{BufReader, Write};
use std::net::TcpStream;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn_megatron::comm::Token;
use burn_megatron::comm::auth::{Connection, Listener, ListenerLimits};

use super::error::LaunchError;
use super::exit_status::RankExitStatus;
use super::output::JobOutput;
use super::plan::{address, listening_address};
use super::protocol::{self, AgentMessage, MAX_PAYLOAD, OutputStream, PURPOSE, RELEASE};
use super::supervise::SupervisorEvent;

/// The launcher's side of the connections to all agents.
pub struct AgentServer {
    listener: Listener,
    shared: Arc<ServerState>,
}

struct ServerState {
    /// The number of the first rank.
    first: usize,
    agents: Mutex<AgentConnections>,
    output: JobOutput,
    events: Sender<SupervisorEvent>,
}

struct AgentConnections {
    streams: Vec<Option<Arc<TcpStream>>>,
    /// The last command to all agents; sent to those that connect later too.
    command: Option<u8>,
}

impl AgentServer {
    /// Listens at `host`, an address of this machine, for the agents of `ranks` ranks from `first` on; they
    /// authenticate with `token`.
    pub fn listen(
        host: &str,
        token: &Token,
        first: usize,
        ranks: usize,
        output: JobOutput,
        events: Sender<SupervisorEvent>,
    ) -> Result<Self, LaunchError> {
        let agents = AgentConnections {
            streams: (0..ranks).map(|_| None).collect(),
            command: None,
        };
        let shared = Arc::new(ServerState {
            first,
            agents: Mutex::new(agents),
            output,
            events,
        });
        let serving = Arc::clone(&shared);
        let serve = move |arrival| {
            // Other clients are ignored.
            if let Connection::Authenticated { hello, stream } = arrival
                && let Ok(rank) = hello.parse()
            {
                serving.serve(rank, stream);
            }
        };
        let (at, limits) = (
            [listening_address(host, 0)?],
            ListenerLimits::for_ranks(ranks),
        );
        let listener = Listener::open(&at, Some(token.clone()), PURPOSE, limits, serve);
        let failed = LaunchError::system("cannot open a port for the output of the ranks");
        Ok(Self {
            listener: listener.map_err(failed)?,
            shared,
        })
    }

    /// The address that the agents connect to, given the name `host` by which they reach this machine.
    pub fn link(&self, host: &str) -> String {
        address(host, self.listener.addresses()[0].port())
    }

    /// Sends a signal to the process group of every rank.
    pub fn signal(&self, signal: i32) {
        if let Ok(command) = u8::try_from(signal) {
            self.shared.broadcast(command);
        }
    }

    /// Lets the agents exit.
    pub fn release(&self) {
        self.shared.broadcast(RELEASE);
    }
}

impl ServerState {
    /// Receives from the agent of a rank until the connection closes.
    fn serve(&self, rank: usize, stream: TcpStream) {
        let stream = Arc::new(stream);
        if self.register(rank, &stream).is_none() {
            return;
        }
        let mut from = BufReader::with_capacity(MAX_PAYLOAD, &*stream);
        let mut output = self.output.rank(rank);
        let mut status = None;
        while let Ok(frame) = protocol::receive(&mut from) {
            match frame {
                AgentMessage::Stdout(bytes) => output.write(OutputStream::Stdout, &bytes),
                AgentMessage::Stderr(bytes) => output.write(OutputStream::Stderr, &bytes),
                AgentMessage::Exited(how) => {
                    output.finish();
                    self.emit(SupervisorEvent::RankExited(rank, how.clone()));
                    status = Some(how);
                }
            }
        }
        output.finish();
        if status.is_none() {
            self.emit(SupervisorEvent::RankExited(
                rank,
                self.presumed_exit_status(),
            ));
        }
    }

    fn register(&self, rank: usize, stream: &Arc<TcpStream>) -> Option<()> {
        super::sys::keep_alive(stream).ok()?;
        let mut agents = self.agents();
        let command = agents.command;
        let place = agents.streams.get_mut(rank.checked_sub(self.first)?)?;
        if place.is_some() {
            return None;
        }
        *place = Some(Arc::clone(stream));
        self.emit(SupervisorEvent::AgentConnected(rank));
        if let Some(command) = command {
            send(stream, command);
        }
        Some(())
    }

    /// The exit status of a rank whose agent disconnected without reporting one.
    fn presumed_exit_status(&self) -> RankExitStatus {
        match self.agents().command {
            Some(command) if i32::from(command) == libc::SIGKILL => {
                RankExitStatus::Signal(libc::SIGKILL)
            }
            _ => RankExitStatus::Lost("the connection to its agent was closed".into()),
        }
    }

    fn broadcast(&self, command: u8) {
        let mut agents = self.agents();
        agents.command = Some(command);
        for stream in agents.streams.iter().flatten() {
            send(stream, command);
        }
    }

    fn agents(&self) -> MutexGuard<'_, AgentConnections> {
        self.agents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn emit(&self, event: SupervisorEvent) {
        // The receiver is gone once the run is over.
        let _ = self.events.send(event);
    }
}

fn send(mut stream: &TcpStream, command: u8) {
    // The reader notices an agent that is gone.
    let _ = stream.write_all(&[command]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_megatron::comm::auth::{HandshakeError, client_handshake};
    use std::io::Read;
    use std::sync::mpsc::{self, Receiver};
    use std::time::Duration;

    const WAIT: Duration = Duration::from_secs(10);

    /// A server for ranks 4 and 5, its events, its address and its token.
    fn server() -> (AgentServer, Receiver<SupervisorEvent>, String, Token) {
        let (sender, events) = mpsc::channel();
        let output = JobOutput::new(6, 4..6, true, None).unwrap();
        let token = Token::random().unwrap();
        let server = AgentServer::listen("127.0.0.1", &token, 4, 2, output, sender).unwrap();
        let address = server.link("127.0.0.1");
        (server, events, address, token)
    }

    fn agent(address: &str, rank: usize, token: &Token) -> TcpStream {
        let stream = TcpStream::connect(address).unwrap();
        client_handshake(&stream, Some(token), PURPOSE, &rank.to_string(), WAIT).unwrap();
        stream.set_read_timeout(Some(WAIT)).unwrap();
        stream
    }

    /// The next command, or nothing if the server has closed the connection.
    fn command(mut stream: &TcpStream) -> Option<u8> {
        let mut command = [0];
        stream.read_exact(&mut command).ok().map(|()| command[0])
    }

    #[test]
    fn commands_reach_all_agents_and_those_that_connect_later() {
        let (server, events, address, token) = server();
        let early = agent(&address, 5, &token);
        assert_eq!(
            events.recv_timeout(WAIT),
            Ok(SupervisorEvent::AgentConnected(5))
        );
        server.signal(15);
        assert_eq!(command(&early), Some(15));
        let late = agent(&address, 4, &token);
        assert_eq!(command(&late), Some(15));
        server.release();
        assert_eq!(
            (command(&early), command(&late)),
            (Some(RELEASE), Some(RELEASE))
        );
    }

    #[test]
    fn unknown_clients_are_rejected() {
        let (_hub, events, address, token) = server();
        let _first = agent(&address, 4, &token);
        assert_eq!(
            events.recv_timeout(WAIT),
            Ok(SupervisorEvent::AgentConnected(4))
        );
        for rank in [3, 6, 4] {
            assert_eq!(command(&agent(&address, rank, &token)), None, "{rank}");
        }
        let stream = TcpStream::connect(&address).unwrap();
        let other = Token::random().unwrap();
        let error = client_handshake(&stream, Some(&other), PURPOSE, "5", WAIT).unwrap_err();
        assert!(matches!(error, HandshakeError::Token), "{error}");
        // The proof for the rendezvous is not valid here.
        let stream = TcpStream::connect(&address).unwrap();
        assert!(client_handshake(&stream, Some(&token), "rendezvous", "5", WAIT).is_err());
        assert!(events.try_recv().is_err());
    }

    #[test]
    fn an_end_is_told_once_and_a_lost_keeper_is_noticed() {
        let (server, events, address, token) = server();
        let mut first = agent(&address, 4, &token);
        protocol::send_exit_status(&mut first, &RankExitStatus::Code(3)).unwrap();
        assert_eq!(
            events.recv_timeout(WAIT),
            Ok(SupervisorEvent::AgentConnected(4))
        );
        assert_eq!(
            events.recv_timeout(WAIT),
            Ok(SupervisorEvent::RankExited(4, RankExitStatus::Code(3)))
        );
        drop(first);
        drop(agent(&address, 5, &token));
        assert_eq!(
            events.recv_timeout(WAIT),
            Ok(SupervisorEvent::AgentConnected(5))
        );
        let lost = events.recv_timeout(WAIT).unwrap();
        assert!(
            matches!(
                lost,
                SupervisorEvent::RankExited(5, RankExitStatus::Lost(_))
            ),
            "{lost:?}"
        );
        server.signal(9);
        assert_eq!(
            server.shared.presumed_exit_status(),
            RankExitStatus::Signal(9),
            "by our own command"
        );
    }
}
