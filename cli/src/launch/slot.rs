//! Slots: the children of mpirun, one per rank, from which the launcher takes the variables of MPI.
//!
//! The processes of an MPI job find each other by variables that mpirun sets for its children. Each child, the hidden
//! command `launch-slot`, sends its environment to the launcher through a socket, and the launcher starts the rank with
//! it. So ranks are children of the launcher with either engine, and mpirun, which ends all of its children as soon as
//! one fails, ends no rank that is about to report the failure. A slot exits when the launcher closes the connection.

use std::env;
use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use tempfile::TempDir;

use super::sys;
use crate::error::Error;

/// The environment variable with the path of the launcher's socket.
pub const SOCKET: &str = "BURN_MEGATRON_LAUNCH_LINK";

/// The variable of mpirun that gives the rank.
const RANK: &str = "OMPI_COMM_WORLD_RANK";

/// Timeout of receiving an environment.
const RECEIVE_TIMEOUT: Duration = Duration::from_secs(30);

/// Sends the environment to the launcher, and waits until it closes the connection.
pub fn run() -> Result<ExitCode, Error> {
    sys::die_with_parent()?;
    let path =
        env::var_os(SOCKET).ok_or_else(|| format!("{SOCKET} is not set: `launch` sets it"))?;
    let mut stream = UnixStream::connect(&path)
        .map_err(|error| format!("cannot connect to the launcher at {path:?}: {error}"))?;
    stream.write_all(&encode(env::vars_os()))?;
    stream.shutdown(Shutdown::Write)?;
    // The launcher sends nothing, and closes the connection at the latest when it dies.
    let _ = stream.read(&mut [0]);
    // For a child that fails, mpirun prints a long message.
    Ok(ExitCode::SUCCESS)
}

/// A slot that has sent its environment.
pub struct Slot {
    /// The rank.
    pub rank: usize,
    /// Its variables, without [`SOCKET`].
    pub variables: Vec<(OsString, OsString)>,
    /// The slot exits when this is dropped.
    pub connection: UnixStream,
}

/// The launcher's socket.
pub struct SlotListener {
    /// Only this user can enter it.
    folder: TempDir,
    listener: UnixListener,
}

impl SlotListener {
    /// Listens in a new folder.
    pub fn open() -> io::Result<Self> {
        let folder = tempfile::Builder::new()
            .prefix("burn-megatron-launch-")
            .tempdir()?;
        let listener = UnixListener::bind(folder.path().join("slots"))?;
        Ok(Self { folder, listener })
    }

    /// The path for [`SOCKET`].
    pub fn path(&self) -> PathBuf {
        self.folder.path().join("slots")
    }

    /// Calls `on_slot` in a thread for each of `ranks` slots, then removes the folder.
    pub fn accept(
        self,
        ranks: usize,
        mut on_slot: impl FnMut(Slot) + Send + 'static,
    ) -> io::Result<()> {
        let Self { folder, listener } = self;
        let accept = move || {
            let mut missing = ranks;
            while missing > 0
                && let Ok((stream, _)) = listener.accept()
            {
                if let Some(slot) = receive(stream) {
                    on_slot(slot);
                    missing -= 1;
                }
            }
            drop(folder);
        };
        let builder = thread::Builder::new().name("slots".into());
        builder.spawn(accept).map(drop)
    }
}

/// `None` if what comes is not the environment of a rank.
fn receive(mut connection: UnixStream) -> Option<Slot> {
    let mut bytes = Vec::new();
    connection.set_read_timeout(Some(RECEIVE_TIMEOUT)).ok()?;
    connection.read_to_end(&mut bytes).ok()?;
    let mut variables = decode(&bytes);
    let (_, rank) = variables.iter().find(|(name, _)| name == RANK)?;
    let rank = rank.to_str()?.parse().ok()?;
    variables.retain(|(name, _)| name != SOCKET);
    Some(Slot {
        rank,
        variables,
        connection,
    })
}

/// `name=value`, each ended by a zero byte, as in `/proc/PID/environ`.
fn encode(variables: impl Iterator<Item = (OsString, OsString)>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (name, value) in variables {
        bytes.extend([name.as_bytes(), b"=", value.as_bytes(), b"\0"].concat());
    }
    bytes
}

fn decode(bytes: &[u8]) -> Vec<(OsString, OsString)> {
    let pairs = bytes.split(|byte| *byte == 0);
    let owned = |bytes: &[u8]| OsString::from_vec(bytes.to_vec());
    pairs
        .filter_map(|pair| {
            let at = pair.iter().position(|byte| *byte == b'=')?;
            Some((owned(&pair[..at]), owned(&pair[at + 1..])))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsStr;
    use std::sync::mpsc;

    fn pair(name: &str, value: &[u8]) -> (OsString, OsString) {
        (name.into(), OsStr::from_bytes(value).to_owned())
    }

    #[test]
    fn an_environment_is_sent_as_it_is() {
        let variables = vec![
            pair("A", b"a = b\n"),
            pair("EMPTY", b""),
            pair("BYTES", b"\xff\xfe"),
        ];
        assert_eq!(decode(&encode(variables.clone().into_iter())), variables);
        assert_eq!(decode(b""), []);
    }

    #[test]
    fn a_slot_waits_until_the_launcher_drops_its_connection() {
        let listener = SlotListener::open().unwrap();
        let path = listener.path();
        let (send, slots) = mpsc::channel();
        listener
            .accept(1, move |slot| send.send(slot).unwrap())
            .unwrap();
        // What is no rank is ignored.
        drop(UnixStream::connect(&path).unwrap());
        let mut stream = UnixStream::connect(&path).unwrap();
        let variables = vec![pair(SOCKET, b"/s"), pair(RANK, b"3"), pair("PMIX", b"x")];
        let sent = encode(variables.clone().into_iter());
        stream.write_all(&sent).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let slot = slots.recv().unwrap();
        assert_eq!((slot.rank, &slot.variables[..]), (3, &variables[1..]));
        drop(slot);
        assert_eq!(stream.read(&mut [0]).unwrap(), 0);
    }
}
