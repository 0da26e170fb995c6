//! Slots: the child processes of mpirun, one per rank, which provide the MPI variables to the launcher.
//!
//! The processes of an MPI job find each other through variables that mpirun sets for its children. Each child runs
//! the hidden command `launch-slot`. It sends its environment to the launcher through a socket, and the launcher
//! starts the rank with this environment. Therefore ranks are children of the launcher with either engine. mpirun
//! ends all of its children as soon as one fails, but it cannot end a rank that is about to report the failure. A
//! slot exits when the launcher closes the connection.

use std::env;
use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::net::Shutdown;
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

/// The mpirun variable with the rank.
const RANK: &str = "OMPI_COMM_WORLD_RANK";

/// Timeout for receiving an environment.
const RECEIVE_TIMEOUT: Duration = Duration::from_secs(30);

/// Environment variables with their values.
pub type Variables = Vec<(OsString, OsString)>;

/// Sends the environment to the launcher, and waits until it closes the connection.
pub fn run() -> Result<ExitCode, Error> {
    sys::die_with_parent()?;
    let path =
        env::var_os(SOCKET).ok_or_else(|| format!("{SOCKET} is not set: `launch` sets it"))?;
    let mut stream = UnixStream::connect(&path)
        .map_err(|error| format!("cannot connect to the launcher at {path:?}: {error}"))?;
    let variables: Variables = env::vars_os().collect();
    stream.write_all(&serde_json::to_vec(&variables)?)?;
    stream.shutdown(Shutdown::Write)?;
    // The launcher sends nothing. It closes the connection when it is done, or when it dies.
    let _ = stream.read(&mut [0]);
    // If a child fails, mpirun prints a long message.
    Ok(ExitCode::SUCCESS)
}

/// Slot that has sent its environment.
pub struct Slot {
    /// The rank.
    pub rank: usize,
    /// The variables of the rank, without [`SOCKET`].
    pub variables: Variables,
    /// The connection to the slot. The slot exits when the connection is dropped.
    pub connection: UnixStream,
}

/// Socket of the launcher.
pub struct SlotListener {
    /// The folder of the socket, which only this user can enter.
    folder: TempDir,
    listener: UnixListener,
}

impl SlotListener {
    /// Opens a socket in a new folder.
    pub fn open() -> io::Result<Self> {
        let folder = tempfile::Builder::new()
            .prefix("burn-megatron-launch-")
            .tempdir()?;
        let listener = UnixListener::bind(folder.path().join("slots"))?;
        Ok(Self { folder, listener })
    }

    /// Returns the path for [`SOCKET`].
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

/// Receives the environment of a rank. Returns `None` if the data is not the environment of a rank.
fn receive(mut connection: UnixStream) -> Option<Slot> {
    let mut bytes = Vec::new();
    connection.set_read_timeout(Some(RECEIVE_TIMEOUT)).ok()?;
    connection.read_to_end(&mut bytes).ok()?;
    let mut variables: Variables = serde_json::from_slice(&bytes).ok()?;
    let (_, rank) = variables.iter().find(|(name, _)| name == RANK)?;
    let rank = rank.to_str()?.parse().ok()?;
    variables.retain(|(name, _)| name != SOCKET);
    Some(Slot {
        rank,
        variables,
        connection,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt as _;
    use std::sync::mpsc;

    fn pair(name: &str, value: &[u8]) -> (OsString, OsString) {
        (name.into(), OsStr::from_bytes(value).to_owned())
    }

    #[test]
    fn a_slot_waits_until_the_launcher_drops_its_connection() {
        let listener = SlotListener::open().unwrap();
        let path = listener.path();
        let (send, slots) = mpsc::channel();
        listener
            .accept(1, move |slot| send.send(slot).unwrap())
            .unwrap();
        // Connections that send no rank are ignored.
        drop(UnixStream::connect(&path).unwrap());
        let mut stream = UnixStream::connect(&path).unwrap();
        let variables = [
            pair(SOCKET, b"/s"),
            pair(RANK, b"3"),
            pair("PMIX", b"a = b\n"),
            pair("EMPTY", b""),
            pair("BYTES", b"\xff\xfe"),
        ];
        serde_json::to_writer(&stream, &variables).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let slot = slots.recv().unwrap();
        assert_eq!((slot.rank, &slot.variables[..]), (3, &variables[1..]));
        drop(slot);
        assert_eq!(stream.read(&mut [0]).unwrap(), 0);
    }
}
