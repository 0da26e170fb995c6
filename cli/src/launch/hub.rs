//! Where the keepers of all ranks connect: their output comes in here, and orders go out.

use std::io::{BufReader, Write};
use std::net::TcpStream;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn_megatron::comm::Token;
use burn_megatron::comm::auth::{Arrival, Limits, Listener};

use super::ending::Ending;
use super::error::LaunchError;
use super::frame::{self, Frame, LEAVE, MAX_PAYLOAD, PURPOSE, Stream};
use super::output::Output;
use super::plan::{address, listening_address};
use super::supervise::Event;

/// The launcher's end of all connections.
pub struct Hub {
    listener: Listener,
    shared: Arc<Shared>,
}

struct Shared {
    /// The number of the first rank.
    first: usize,
    keepers: Mutex<Keepers>,
    output: Output,
    events: Sender<Event>,
}

struct Keepers {
    streams: Vec<Option<Arc<TcpStream>>>,
    /// The last order to all: who comes late gets it too.
    order: Option<u8>,
}

impl Hub {
    /// Listens at `host`, which is this machine, for the keepers of `ranks` ranks from `first` on, which have
    /// `token`.
    pub fn listen(
        host: &str,
        token: &Token,
        first: usize,
        ranks: usize,
        output: Output,
        events: Sender<Event>,
    ) -> Result<Self, LaunchError> {
        let keepers = Keepers {
            streams: (0..ranks).map(|_| None).collect(),
            order: None,
        };
        let shared = Arc::new(Shared {
            first,
            keepers: Mutex::new(keepers),
            output,
            events,
        });
        let serving = Arc::clone(&shared);
        let serve = move |arrival| {
            // Whoever is no keeper of this run is left alone.
            if let Arrival::Known { hello, stream } = arrival
                && let Ok(rank) = hello.parse()
            {
                serving.serve(rank, stream);
            }
        };
        let (at, limits) = ([listening_address(host, 0)?], Limits::for_ranks(ranks));
        let listener = Listener::open(&at, Some(token.clone()), PURPOSE, limits, serve);
        let failed = LaunchError::system("no port can be had for the output of the ranks");
        Ok(Self {
            listener: listener.map_err(failed)?,
            shared,
        })
    }

    /// What the keepers need to know, which reach this machine as `host`.
    pub fn link(&self, host: &str) -> String {
        address(host, self.listener.addresses()[0].port())
    }

    /// Sends a signal to every rank and all that it has started.
    pub fn signal(&self, signal: i32) {
        if let Ok(order) = u8::try_from(signal) {
            self.shared.order(order);
        }
    }

    /// Lets the keepers go.
    pub fn leave(&self) {
        self.shared.order(LEAVE);
    }
}

impl Shared {
    /// Takes in what the keeper of a rank sends, until it ends.
    fn serve(&self, rank: usize, stream: TcpStream) {
        let stream = Arc::new(stream);
        if self.join(rank, &stream).is_none() {
            return;
        }
        let mut from = BufReader::with_capacity(MAX_PAYLOAD, &*stream);
        let mut output = self.output.rank(rank);
        let mut ending = None;
        while let Ok(frame) = frame::receive(&mut from) {
            match frame {
                Frame::Out(bytes) => output.write(Stream::Out, &bytes),
                Frame::Err(bytes) => output.write(Stream::Err, &bytes),
                Frame::Ended(how) => {
                    output.finish();
                    self.tell(Event::Ended(rank, how.clone()));
                    ending = Some(how);
                }
            }
        }
        output.finish();
        if ending.is_none() {
            self.tell(Event::Ended(rank, self.unsaid()));
        }
    }

    fn join(&self, rank: usize, stream: &Arc<TcpStream>) -> Option<()> {
        super::sys::keep_alive(stream).ok()?;
        let mut keepers = self.keepers();
        let order = keepers.order;
        let place = keepers.streams.get_mut(rank.checked_sub(self.first)?)?;
        if place.is_some() {
            return None;
        }
        *place = Some(Arc::clone(stream));
        self.tell(Event::Joined(rank));
        if let Some(order) = order {
            send(stream, order);
        }
        Some(())
    }

    /// How a rank ended whose keeper is gone without a word.
    fn unsaid(&self) -> Ending {
        match self.keepers().order {
            Some(order) if i32::from(order) == libc::SIGKILL => Ending::Signal(libc::SIGKILL),
            _ => Ending::Lost("the connection to the process that keeps it has ended".into()),
        }
    }

    fn order(&self, order: u8) {
        let mut keepers = self.keepers();
        keepers.order = Some(order);
        for stream in keepers.streams.iter().flatten() {
            send(stream, order);
        }
    }

    fn keepers(&self) -> MutexGuard<'_, Keepers> {
        self.keepers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, event: Event) {
        // Nobody listens any more once the run is over.
        let _ = self.events.send(event);
    }
}

fn send(mut stream: &TcpStream, order: u8) {
    // A keeper that is gone is noticed by its reader.
    let _ = stream.write_all(&[order]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_megatron::comm::auth::{IntroduceError, introduce};
    use std::io::Read;
    use std::sync::mpsc::{self, Receiver};
    use std::time::Duration;

    const WAIT: Duration = Duration::from_secs(10);

    /// A hub for ranks 4 and 5, what it tells, where it listens, and its token.
    fn hub() -> (Hub, Receiver<Event>, String, Token) {
        let (tell, told) = mpsc::channel();
        let output = Output::new(6, 4..6, true, None).unwrap();
        let token = Token::random().unwrap();
        let hub = Hub::listen("127.0.0.1", &token, 4, 2, output, tell).unwrap();
        let address = hub.link("127.0.0.1");
        (hub, told, address, token)
    }

    fn keeper(address: &str, rank: usize, token: &Token) -> TcpStream {
        let stream = TcpStream::connect(address).unwrap();
        introduce(&stream, Some(token), PURPOSE, &rank.to_string(), WAIT).unwrap();
        stream.set_read_timeout(Some(WAIT)).unwrap();
        stream
    }

    /// The next order, or nothing if the hub has hung up.
    fn order(mut stream: &TcpStream) -> Option<u8> {
        let mut order = [0];
        stream.read_exact(&mut order).ok().map(|()| order[0])
    }

    #[test]
    fn orders_reach_all_and_those_who_come_late() {
        let (hub, told, address, token) = hub();
        let early = keeper(&address, 5, &token);
        assert_eq!(told.recv_timeout(WAIT), Ok(Event::Joined(5)));
        hub.signal(15);
        assert_eq!(order(&early), Some(15));
        let late = keeper(&address, 4, &token);
        assert_eq!(order(&late), Some(15));
        hub.leave();
        assert_eq!((order(&early), order(&late)), (Some(LEAVE), Some(LEAVE)));
    }

    #[test]
    fn strangers_are_turned_away() {
        let (_hub, told, address, token) = hub();
        let _first = keeper(&address, 4, &token);
        assert_eq!(told.recv_timeout(WAIT), Ok(Event::Joined(4)));
        for rank in [3, 6, 4] {
            assert_eq!(order(&keeper(&address, rank, &token)), None, "{rank}");
        }
        let stream = TcpStream::connect(&address).unwrap();
        let other = Token::random().unwrap();
        let error = introduce(&stream, Some(&other), PURPOSE, "5", WAIT).unwrap_err();
        assert!(matches!(error, IntroduceError::Token), "{error}");
        // What opens the rendezvous does not open this.
        let stream = TcpStream::connect(&address).unwrap();
        assert!(introduce(&stream, Some(&token), "rendezvous", "5", WAIT).is_err());
        assert!(told.try_recv().is_err());
    }

    #[test]
    fn an_end_is_told_once_and_a_lost_keeper_is_noticed() {
        let (hub, told, address, token) = hub();
        let mut first = keeper(&address, 4, &token);
        frame::send_ending(&mut first, &Ending::Code(3)).unwrap();
        assert_eq!(told.recv_timeout(WAIT), Ok(Event::Joined(4)));
        assert_eq!(
            told.recv_timeout(WAIT),
            Ok(Event::Ended(4, Ending::Code(3)))
        );
        drop(first);
        drop(keeper(&address, 5, &token));
        assert_eq!(told.recv_timeout(WAIT), Ok(Event::Joined(5)));
        let lost = told.recv_timeout(WAIT).unwrap();
        assert!(matches!(lost, Event::Ended(5, Ending::Lost(_))), "{lost:?}");
        hub.signal(9);
        assert_eq!(hub.shared.unsaid(), Ending::Signal(9), "by our own order");
    }
}
