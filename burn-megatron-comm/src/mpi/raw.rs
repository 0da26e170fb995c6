//! The calls to MPI. All that is `unsafe` in this room is here.
//!
//! # Why it is sound
//! - [`World`] holds raw handles and is neither `Send` nor `Sync`, so all calls are made by the thread
//!   that started MPI, which the level `MPI_THREAD_FUNNELED` allows.
//! - The memory of a message is owned by its [`Flight`], which lives at least until MPI says that the
//!   message is complete. If requests are dropped before, their memory is leaked on purpose: MPI may still
//!   read or write it.

use std::ffi::{c_int, c_void};
use std::marker::PhantomData;
use std::mem::{self, ManuallyDrop};
use std::ops::Range;
use std::rc::Rc;

use ::mpi::environment::{Threading, Universe, initialize_with_threading};
use ::mpi::ffi;
use ::mpi::ffi::{MPI_Comm, MPI_Request, MPI_Status};

use super::ENGINE;
use crate::error::CommError;
use crate::exchange::{Incoming, NOTE, Outgoing, Ticket};

/// The largest message that is given to MPI, in bytes: its counts are C ints.
pub const LARGEST: usize = 1 << 30;

/// The tag of notes; payloads have higher ones.
const NOTES: c_int = 0;

/// An error of this engine.
pub fn failure(message: String) -> CommError {
    CommError::Engine {
        engine: ENGINE.to_owned(),
        message,
    }
}

/// Turns a return code into an error that names the function and the rank at the other end.
fn check(code: c_int, function: &str, peer: Option<usize>) -> Result<(), CommError> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut text = [0u8; ffi::MPI_MAX_ERROR_STRING as usize];
    let mut len: c_int = 0;
    // SAFETY: the text has the room that the standard asks for.
    let known = unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &raw mut len) };
    let text = match usize::try_from(len) {
        Ok(len) if known == ffi::MPI_SUCCESS as c_int && len <= text.len() => {
            String::from_utf8_lossy(&text[..len]).into_owned()
        }
        _ => format!("error {code}"),
    };
    let peer = peer.map_or_else(String::new, |rank| format!(" with rank {rank}"));
    Err(failure(format!("{function}{peer}: {text}")))
}

/// MPI, started, with a communicator of its own.
pub struct World {
    comm: MPI_Comm,
    pub rank: usize,
    pub size: usize,
    pub threading: Threading,
    /// Dropping it would wait for all ranks, which only [`finish`](Self::finish) does.
    universe: ManuallyDrop<Universe>,
    /// Stays on its thread.
    _here: PhantomData<*mut ()>,
}

impl World {
    pub fn open() -> Result<Self, CommError> {
        // Only this thread calls MPI, so that a library that gives less than was asked for will do.
        let (universe, threading) =
            initialize_with_threading(Threading::Serialized).ok_or_else(|| {
                failure(
                    "MPI was already started in this process, and can be started but once".into(),
                )
            })?;
        let universe = ManuallyDrop::new(universe);
        let (mut comm, mut rank, mut size) = (unsafe { ffi::RSMPI_COMM_NULL }, 0, 0);
        // SAFETY: MPI is initialised, and every pointer is that of a local variable.
        unsafe {
            let world = ffi::RSMPI_COMM_WORLD;
            let handler = ffi::RSMPI_ERRORS_RETURN;
            let set = "MPI_Comm_set_errhandler";
            check(ffi::MPI_Comm_set_errhandler(world, handler), set, None)?;
            check(
                ffi::MPI_Comm_dup(world, &raw mut comm),
                "MPI_Comm_dup",
                None,
            )?;
            check(ffi::MPI_Comm_set_errhandler(comm, handler), set, None)?;
            check(
                ffi::MPI_Comm_rank(comm, &raw mut rank),
                "MPI_Comm_rank",
                None,
            )?;
            check(
                ffi::MPI_Comm_size(comm, &raw mut size),
                "MPI_Comm_size",
                None,
            )?;
        }
        Ok(Self {
            comm,
            rank: rank as usize,
            size: size as usize,
            threading,
            universe,
            _here: PhantomData,
        })
    }

    /// Ends MPI, when no message is under way on any rank. All ranks come here.
    pub fn finish(mut self) -> Result<(), CommError> {
        // SAFETY: the communicator is this value's own, and no request uses it any more.
        let freed = unsafe { ffi::MPI_Comm_free(&raw mut self.comm) };
        check(freed, "MPI_Comm_free", None)?;
        drop(ManuallyDrop::into_inner(self.universe));
        Ok(())
    }
}

/// The memory of a message.
pub enum Memory {
    Note(Vec<u8>),
    Payload(Outgoing),
    Place(Incoming),
}

/// A message that MPI has been given.
pub struct Flight {
    pub memory: Memory,
    pub peer: usize,
    /// The name of a payload; a note has none.
    pub ticket: Option<Ticket>,
}

impl Flight {
    fn len(&self) -> usize {
        match &self.memory {
            Memory::Note(bytes) => bytes.len(),
            Memory::Payload(payload) => payload.bytes().len(),
            Memory::Place(place) => place.len(),
        }
    }

    fn function(&self) -> &'static str {
        match &self.memory {
            Memory::Note(_) => "MPI_Isend",
            Memory::Payload(_) => "MPI_Issend",
            Memory::Place(_) => "MPI_Irecv",
        }
    }

    /// Gives MPI the bytes `range` of the message.
    fn start(
        &self,
        world: &World,
        tag: c_int,
        range: Range<usize>,
    ) -> Result<MPI_Request, CommError> {
        let (comm, peer) = (world.comm, self.peer as c_int);
        let count = c_int::try_from(range.len()).expect("a piece fits the counts of MPI");
        // SAFETY: the range lies in the memory of this flight, which stays where it is until MPI is done
        // with it, and is read only by MPI or written only by MPI. The static handles are set by MPI.
        unsafe {
            let (byte, mut request) = (ffi::RSMPI_UINT8_T, ffi::RSMPI_REQUEST_NULL);
            let request_at = &raw mut request;
            let code = match &self.memory {
                Memory::Note(bytes) => {
                    let start = bytes.as_ptr().add(range.start).cast::<c_void>();
                    ffi::MPI_Isend(start, count, byte, peer, tag, comm, request_at)
                }
                Memory::Payload(payload) => {
                    let start = payload.bytes().as_ptr().add(range.start).cast::<c_void>();
                    ffi::MPI_Issend(start, count, byte, peer, tag, comm, request_at)
                }
                Memory::Place(place) => {
                    let start = place.address().add(range.start).cast::<c_void>();
                    ffi::MPI_Irecv(start, count, byte, peer, tag, comm, request_at)
                }
            };
            check(code, self.function(), Some(self.peer))?;
            Ok(request)
        }
    }
}

/// The messages under way.
pub struct Flights {
    requests: Vec<MPI_Request>,
    /// The message of each request; a long one has several.
    flights: Vec<Rc<Flight>>,
    indices: Vec<c_int>,
    statuses: Vec<MPI_Status>,
}

/// A status before MPI has written it.
fn blank() -> MPI_Status {
    // SAFETY: a status is made of plain numbers, whatever the MPI, so that zeros are one.
    unsafe { mem::zeroed() }
}

impl Flights {
    pub fn new() -> Self {
        Self {
            requests: Vec::new(),
            flights: Vec::new(),
            indices: Vec::new(),
            statuses: Vec::new(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Gives MPI a message, in pieces of at most `largest` bytes, which arrive in order.
    pub fn launch(
        &mut self,
        world: &World,
        flight: Flight,
        tag: u16,
        largest: usize,
    ) -> Result<(), CommError> {
        let (len, flight) = (flight.len(), Rc::new(flight));
        for start in (0..len).step_by(largest) {
            let piece = start..len.min(start + largest);
            self.requests
                .push(flight.start(world, c_int::from(tag), piece)?);
            self.flights.push(Rc::clone(&flight));
        }
        Ok(())
    }

    /// Hands the messages that are complete to `done`.
    pub fn land(&mut self, mut done: impl FnMut(Flight)) -> Result<(), CommError> {
        let count = self.requests.len();
        if count == 0 {
            return Ok(());
        }
        self.indices.resize(count, 0);
        self.statuses.resize(count, blank());
        let mut landed: c_int = 0;
        // SAFETY: the three arrays have `count` entries.
        let code = unsafe {
            ffi::MPI_Testsome(
                count as c_int,
                self.requests.as_mut_ptr(),
                &raw mut landed,
                self.indices.as_mut_ptr(),
                self.statuses.as_mut_ptr(),
            )
        };
        // That no request is active has a negative number, and does not happen here.
        let landed = usize::try_from(landed).unwrap_or(0);
        if code != ffi::MPI_SUCCESS as c_int {
            return Err(self.error(code, landed));
        }
        let indices = &mut self.indices[..landed];
        indices.sort_unstable_by(|a, b| b.cmp(a));
        for index in indices {
            let index = *index as usize;
            self.requests.swap_remove(index);
            if let Some(flight) = Rc::into_inner(self.flights.swap_remove(index)) {
                done(flight);
            }
        }
        Ok(())
    }

    /// The error of the first request that has one.
    fn error(&self, code: c_int, landed: usize) -> CommError {
        let mut pairs = self.indices[..landed].iter().zip(&self.statuses);
        let failed = pairs.find_map(|(index, status)| {
            let flight = &self.flights[*index as usize];
            check(status.MPI_ERROR, flight.function(), Some(flight.peer)).err()
        });
        let whole = check(code, "MPI_Testsome", None).err();
        let error = match code == ffi::MPI_ERR_IN_STATUS as c_int {
            true => failed.or(whole),
            false => whole,
        };
        error.unwrap_or_else(|| failure(format!("MPI_Testsome: error {code}")))
    }
}

impl Drop for Flights {
    fn drop(&mut self) {
        // MPI may still use the memory.
        mem::forget(mem::take(&mut self.flights));
    }
}

/// Notes from anybody, in a ring of receives that are always posted.
pub struct Inbox {
    requests: Vec<MPI_Request>,
    places: ManuallyDrop<Vec<Vec<u8>>>,
    /// The receive that the next note comes to.
    next: usize,
}

impl Inbox {
    pub fn open(world: &World, depth: usize) -> Result<Self, CommError> {
        let null = unsafe { ffi::RSMPI_REQUEST_NULL };
        let mut inbox = Self {
            requests: vec![null; depth],
            places: ManuallyDrop::new(vec![vec![0; NOTE]; depth]),
            next: 0,
        };
        for index in 0..depth {
            inbox.post(world, index)?;
        }
        Ok(inbox)
    }

    fn post(&mut self, world: &World, index: usize) -> Result<(), CommError> {
        let start = self.places[index].as_mut_ptr().cast::<c_void>();
        // SAFETY: the place has so many bytes and is not touched until the request is complete; it is
        // never freed before.
        let code = unsafe {
            ffi::MPI_Irecv(
                start,
                NOTE as c_int,
                ffi::RSMPI_UINT8_T,
                ffi::RSMPI_ANY_SOURCE,
                NOTES,
                world.comm,
                &raw mut self.requests[index],
            )
        };
        check(code, "MPI_Irecv of a note", None)
    }

    /// The next note and its sender, if it is there.
    pub fn next(&mut self, world: &World) -> Result<Option<(usize, Vec<u8>)>, CommError> {
        let index = self.next;
        let (mut there, mut status, mut len): (c_int, _, c_int) = (0, blank(), 0);
        // SAFETY: the pointers are those of local variables and of a request that was posted.
        unsafe {
            let request = &raw mut self.requests[index];
            let code = ffi::MPI_Test(request, &raw mut there, &raw mut status);
            check(code, "MPI_Test of a note", None)?;
            if there == 0 {
                return Ok(None);
            }
            let code = ffi::MPI_Get_count(&raw const status, ffi::RSMPI_UINT8_T, &raw mut len);
            check(code, "MPI_Get_count", None)?;
        }
        let note = self.places[index][..len as usize].to_vec();
        self.post(world, index)?;
        self.next = (index + 1) % self.requests.len();
        Ok(Some((status.MPI_SOURCE as usize, note)))
    }

    /// Takes the receives back, when nobody sends any more.
    pub fn finish(mut self) -> Result<(), CommError> {
        for request in &mut self.requests {
            let mut status = blank();
            // SAFETY: the request is one that was posted.
            unsafe {
                check(ffi::MPI_Cancel(request), "MPI_Cancel", None)?;
                check(ffi::MPI_Wait(request, &raw mut status), "MPI_Wait", None)?;
            }
        }
        drop(ManuallyDrop::into_inner(self.places));
        Ok(())
    }
}
