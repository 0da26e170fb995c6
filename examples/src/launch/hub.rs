//! Where the keepers of all ranks connect: their output comes in here, and orders go out.

use std::fs::File;
use std::io::{self, BufReader, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, TcpListener, TcpStream};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use super::ending::Ending;
use super::error::LaunchError;
use super::frame::{self, Frame, LEAVE, MAX_PAYLOAD, SECRET_LEN, Stream};
use super::output::Output;
use super::plan::address;
use super::say;
use super::supervise::Event;

/// How long a connection may take to say which rank it is.
const GREETING: Duration = Duration::from_secs(10);

/// A thread per rank reads its output; it needs little.
const STACK_BYTES: usize = 256 << 10;

/// The launcher's end of all connections.
pub struct Hub {
    port: u16,
    shared: Arc<Shared>,
}

struct Shared {
    secret: String,
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
    /// Listens for the keepers of `ranks` ranks from `first` on: on every address of this machine, or on
    /// 127.0.0.1 alone.
    pub fn listen(
        everywhere: bool,
        first: usize,
        ranks: usize,
        output: Output,
        events: Sender<Event>,
    ) -> Result<Self, LaunchError> {
        let failed = LaunchError::system;
        let what = "no port can be had for the output of the ranks";
        let listener = match everywhere {
            // This takes IPv4 in as well, where there is IPv6 at all.
            true => TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0))
                .or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0))),
            false => TcpListener::bind((Ipv4Addr::LOCALHOST, 0)),
        };
        let listener = listener.map_err(failed(what))?;
        let port = listener.local_addr().map_err(failed(what))?.port();
        let keepers = Keepers {
            streams: (0..ranks).map(|_| None).collect(),
            order: None,
        };
        let shared = Arc::new(Shared {
            secret: secret().map_err(failed("/dev/urandom gives no secret"))?,
            first,
            keepers: Mutex::new(keepers),
            output,
            events,
        });
        let accepting = Arc::clone(&shared);
        let builder = thread::Builder::new().name("accept".into());
        builder
            .spawn(move || accept(&listener, &accepting))
            .map_err(failed("a thread cannot be started"))?;
        Ok(Self { port, shared })
    }

    /// What the keepers need to know, which reach this machine as `host`.
    pub fn link(&self, host: &str) -> String {
        format!("{}/{}", address(host, self.port), self.shared.secret)
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

fn secret() -> io::Result<String> {
    let mut bytes = [0; SECRET_LEN / 2];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    loop {
        let served = listener.accept().and_then(|(stream, _)| {
            let shared = Arc::clone(shared);
            let builder = thread::Builder::new().stack_size(STACK_BYTES);
            builder.spawn(move || shared.serve(stream))
        });
        if let Err(error) = served {
            say(&format!("error: a rank cannot be taken in: {error}"));
            // What is missing (files, threads) may come back.
            thread::sleep(Duration::from_millis(100));
        }
    }
}

impl Shared {
    /// Takes in what one keeper sends, until it ends.
    fn serve(&self, stream: TcpStream) {
        let stream = Arc::new(stream);
        let mut from = BufReader::with_capacity(MAX_PAYLOAD, &*stream);
        // Whoever is no keeper of this run is left alone.
        let Some(rank) = self.join(&stream, &mut from) else {
            return;
        };
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

    fn join(&self, stream: &Arc<TcpStream>, from: &mut impl Read) -> Option<usize> {
        stream.set_read_timeout(Some(GREETING)).ok()?;
        let rank = frame::greeted(from, &self.secret).ok()?;
        stream.set_read_timeout(None).ok()?;
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
        Some(rank)
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
    use std::sync::mpsc::{self, Receiver};

    const WAIT: Duration = Duration::from_secs(10);

    /// A hub for ranks 4 and 5, what it tells, and where it listens.
    fn hub() -> (Hub, Receiver<Event>, String, String) {
        let (tell, told) = mpsc::channel();
        let output = Output::new(6, 4..6, true, None).unwrap();
        let hub = Hub::listen(false, 4, 2, output, tell).unwrap();
        let link = hub.link("127.0.0.1");
        let (address, secret) = link.split_once('/').unwrap();
        let (address, secret) = (address.to_owned(), secret.to_owned());
        (hub, told, address, secret)
    }

    fn keeper(address: &str, rank: usize, secret: &str) -> TcpStream {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(WAIT)).unwrap();
        frame::greet(&mut stream, rank, secret).unwrap();
        stream
    }

    /// The next order, or nothing if the hub has hung up.
    fn order(mut stream: &TcpStream) -> Option<u8> {
        let mut order = [0];
        stream.read_exact(&mut order).ok().map(|()| order[0])
    }

    #[test]
    fn orders_reach_all_and_those_who_come_late() {
        let (hub, told, address, secret) = hub();
        let early = keeper(&address, 5, &secret);
        assert_eq!(told.recv_timeout(WAIT), Ok(Event::Joined(5)));
        hub.signal(15);
        assert_eq!(order(&early), Some(15));
        let late = keeper(&address, 4, &secret);
        assert_eq!(order(&late), Some(15));
        hub.leave();
        assert_eq!((order(&early), order(&late)), (Some(LEAVE), Some(LEAVE)));
    }

    #[test]
    fn strangers_are_turned_away() {
        let (_hub, told, address, secret) = hub();
        let _first = keeper(&address, 4, &secret);
        assert_eq!(told.recv_timeout(WAIT), Ok(Event::Joined(4)));
        for (rank, secret) in [
            (5, &"0".repeat(32)),
            (3, &secret),
            (6, &secret),
            (4, &secret),
        ] {
            assert_eq!(order(&keeper(&address, rank, secret)), None, "{rank}");
        }
        assert!(told.try_recv().is_err());
    }

    #[test]
    fn an_end_is_told_once_and_a_lost_keeper_is_noticed() {
        let (hub, told, address, secret) = hub();
        let mut first = keeper(&address, 4, &secret);
        frame::send_ending(&mut first, &Ending::Code(3)).unwrap();
        assert_eq!(told.recv_timeout(WAIT), Ok(Event::Joined(4)));
        assert_eq!(
            told.recv_timeout(WAIT),
            Ok(Event::Ended(4, Ending::Code(3)))
        );
        drop(first);
        drop(keeper(&address, 5, &secret));
        assert_eq!(told.recv_timeout(WAIT), Ok(Event::Joined(5)));
        let lost = told.recv_timeout(WAIT).unwrap();
        assert!(matches!(lost, Event::Ended(5, Ending::Lost(_))), "{lost:?}");
        hub.signal(9);
        assert_eq!(hub.shared.unsaid(), Ending::Signal(9), "by our own order");
    }
}
