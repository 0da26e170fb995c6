//! The calls to MPI. All `unsafe` code of the MPI engine is in this module.
//!
//! # Soundness
//! - [`MpiWorld`] holds raw handles and is neither `Send` nor `Sync`. Therefore the thread that started MPI makes all
//!   calls, as the level `MPI_THREAD_FUNNELED` allows.
//! - The memory of a message is owned by its [`MpiMessage`], which lives at least until MPI reports that the message is
//!   complete. If requests are dropped earlier, their memory is leaked on purpose, because MPI may still read or write
//!   it.

use std::ffi::{c_int, c_void};
use std::marker::PhantomData;
use std::mem::{self, ManuallyDrop};
use std::ops::Range;
use std::rc::Rc;

use ::mpi::environment::{Threading, Universe, initialize_with_threading};
use ::mpi::ffi;
use ::mpi::ffi::{MPI_Comm, MPI_Request, MPI_Status};

use super::ENGINE;
use crate::engines::p2p_collectives::{MAX_CONTROL_BYTES, ReceiveSlice, RequestId, SendSlice};
use crate::error::CommError;

/// The maximum number of bytes of a message that is passed to MPI, because MPI counts are C ints.
pub const MAX_MESSAGE_BYTES: usize = 1 << 30;

/// The tag of control messages. Payloads use greater tags.
const CONTROL_TAG: c_int = 0;

/// Creates an error of the MPI engine.
pub fn failure(message: String) -> CommError {
    CommError::engine(ENGINE, message)
}

/// Converts an MPI return code into a result. The error names the MPI function and the other rank.
fn check(code: c_int, function: &str, peer: Option<usize>) -> Result<(), CommError> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut text = [0u8; ffi::MPI_MAX_ERROR_STRING as usize];
    let mut len: c_int = 0;
    // SAFETY: the buffer has the size that the MPI standard requires.
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

/// Calls an MPI function and checks its return code.
macro_rules! call {
    ($function:ident($($argument:expr),*)) => {
        check(ffi::$function($($argument),*), stringify!($function), None)
    };
}

/// A running MPI, with a separate communicator for this engine.
pub struct MpiWorld {
    comm: MPI_Comm,
    pub rank: usize,
    pub size: usize,
    pub threading: Threading,
    /// This field is not dropped automatically, because dropping it waits for all ranks. Only [`finish`](Self::finish)
    /// drops it.
    universe: ManuallyDrop<Universe>,
    /// A marker that makes the type neither `Send` nor `Sync`.
    _here: PhantomData<*mut ()>,
}

impl MpiWorld {
    pub fn open() -> Result<Self, CommError> {
        // Only this thread calls MPI, so a lower level than the requested level is sufficient.
        let (universe, threading) =
            initialize_with_threading(Threading::Serialized).ok_or_else(|| {
                failure(
                    "MPI was already started in this process, and can be started only once".into(),
                )
            })?;
        let universe = ManuallyDrop::new(universe);
        let (mut comm, mut rank, mut size) = (unsafe { ffi::RSMPI_COMM_NULL }, 0, 0);
        // SAFETY: MPI is initialized, and every pointer points to a local variable.
        unsafe {
            let world = ffi::RSMPI_COMM_WORLD;
            let handler = ffi::RSMPI_ERRORS_RETURN;
            call!(MPI_Comm_set_errhandler(world, handler))?;
            call!(MPI_Comm_dup(world, &raw mut comm))?;
            call!(MPI_Comm_set_errhandler(comm, handler))?;
            call!(MPI_Comm_rank(comm, &raw mut rank))?;
            call!(MPI_Comm_size(comm, &raw mut size))?;
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

    /// Finalizes MPI. No message may be in flight on any rank. Collective: call on all ranks.
    pub fn finish(mut self) -> Result<(), CommError> {
        // SAFETY: this value owns the communicator, and no request uses it anymore.
        unsafe { call!(MPI_Comm_free(&raw mut self.comm)) }?;
        drop(ManuallyDrop::into_inner(self.universe));
        Ok(())
    }
}

/// The memory of a message.
pub enum MessageMemory {
    Control(Vec<u8>),
    Send(SendSlice),
    Receive(ReceiveSlice),
}

/// A message that has been passed to MPI.
pub struct MpiMessage {
    pub memory: MessageMemory,
    pub peer: usize,
    /// The request of a payload, or `None` for a control message.
    pub request: Option<RequestId>,
}

impl MpiMessage {
    fn len(&self) -> usize {
        match &self.memory {
            MessageMemory::Control(bytes) => bytes.len(),
            MessageMemory::Send(payload) => payload.bytes().len(),
            MessageMemory::Receive(place) => place.len(),
        }
    }

    fn function(&self) -> &'static str {
        match &self.memory {
            MessageMemory::Control(_) => "MPI_Isend",
            MessageMemory::Send(_) => "MPI_Issend",
            MessageMemory::Receive(_) => "MPI_Irecv",
        }
    }

    /// Passes the part of the message in `range` to MPI.
    fn start(
        &self,
        world: &MpiWorld,
        tag: c_int,
        range: Range<usize>,
    ) -> Result<MPI_Request, CommError> {
        let (comm, peer) = (world.comm, self.peer as c_int);
        let count = c_int::try_from(range.len()).expect("a piece fits the counts of MPI");
        // SAFETY: the range lies in the memory of this message. The memory stays in place until MPI is done with it,
        // and only MPI reads or writes it. MPI sets the static handles.
        unsafe {
            let (byte, mut request) = (ffi::RSMPI_UINT8_T, ffi::RSMPI_REQUEST_NULL);
            let request_at = &raw mut request;
            let code = match &self.memory {
                MessageMemory::Control(bytes) => {
                    let start = bytes.as_ptr().add(range.start).cast::<c_void>();
                    ffi::MPI_Isend(start, count, byte, peer, tag, comm, request_at)
                }
                MessageMemory::Send(payload) => {
                    let start = payload.bytes().as_ptr().add(range.start).cast::<c_void>();
                    ffi::MPI_Issend(start, count, byte, peer, tag, comm, request_at)
                }
                MessageMemory::Receive(place) => {
                    let start = place.address().add(range.start).cast::<c_void>();
                    ffi::MPI_Irecv(start, count, byte, peer, tag, comm, request_at)
                }
            };
            check(code, self.function(), Some(self.peer))?;
            Ok(request)
        }
    }
}

/// The messages in flight.
pub struct MessageSet {
    requests: Vec<MPI_Request>,
    /// The message of each request. A message that is sent in pieces has several requests.
    messages: Vec<Rc<MpiMessage>>,
    indices: Vec<c_int>,
    statuses: Vec<MPI_Status>,
}

/// Returns a status that MPI has not written yet.
fn empty_status() -> MPI_Status {
    // SAFETY: in every MPI, a status consists of plain numbers, so zeros are valid.
    unsafe { mem::zeroed() }
}

impl MessageSet {
    pub fn new() -> Self {
        Self {
            requests: Vec::new(),
            messages: Vec::new(),
            indices: Vec::new(),
            statuses: Vec::new(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Passes a message to MPI, in pieces of at most `largest` bytes. The pieces arrive in order.
    pub fn start(
        &mut self,
        world: &MpiWorld,
        message: MpiMessage,
        tag: u16,
        largest: usize,
    ) -> Result<(), CommError> {
        let (len, message) = (message.len(), Rc::new(message));
        for start in (0..len).step_by(largest) {
            let piece = start..len.min(start + largest);
            self.requests
                .push(message.start(world, c_int::from(tag), piece)?);
            self.messages.push(Rc::clone(&message));
        }
        Ok(())
    }

    /// Calls `done` with each completed message.
    pub fn test_some(&mut self, mut done: impl FnMut(MpiMessage)) -> Result<(), CommError> {
        let count = self.requests.len();
        if count == 0 {
            return Ok(());
        }
        self.indices.resize(count, 0);
        self.statuses.resize(count, empty_status());
        let mut completed: c_int = 0;
        // SAFETY: the three arrays have `count` entries.
        let code = unsafe {
            ffi::MPI_Testsome(
                count as c_int,
                self.requests.as_mut_ptr(),
                &raw mut completed,
                self.indices.as_mut_ptr(),
                self.statuses.as_mut_ptr(),
            )
        };
        // The count is negative if no request is active. This does not happen here.
        let completed = usize::try_from(completed).unwrap_or(0);
        if code != ffi::MPI_SUCCESS as c_int {
            return Err(self.error(code, completed));
        }
        let indices = &mut self.indices[..completed];
        indices.sort_unstable_by(|a, b| b.cmp(a));
        for index in indices {
            let index = *index as usize;
            self.requests.swap_remove(index);
            if let Some(message) = Rc::into_inner(self.messages.swap_remove(index)) {
                done(message);
            }
        }
        Ok(())
    }

    /// Returns the error of the first failed request.
    fn error(&self, code: c_int, completed: usize) -> CommError {
        let mut pairs = self.indices[..completed].iter().zip(&self.statuses);
        let failed = pairs.find_map(|(index, status)| {
            let message = &self.messages[*index as usize];
            check(status.MPI_ERROR, message.function(), Some(message.peer)).err()
        });
        let whole = check(code, "MPI_Testsome", None).err();
        let error = if code == ffi::MPI_ERR_IN_STATUS as c_int {
            failed.or(whole)
        } else {
            whole
        };
        error.unwrap_or_else(|| failure(format!("MPI_Testsome: error {code}")))
    }
}

impl Drop for MessageSet {
    fn drop(&mut self) {
        // The memory is leaked, because MPI may still use it.
        mem::forget(mem::take(&mut self.messages));
    }
}

/// Posted receives for control messages from any rank. The receives form a ring and are always posted.
pub struct ControlReceives {
    requests: Vec<MPI_Request>,
    buffers: ManuallyDrop<Vec<Vec<u8>>>,
    /// The index of the receive that gets the next message.
    next: usize,
}

impl ControlReceives {
    pub fn open(world: &MpiWorld, depth: usize) -> Result<Self, CommError> {
        let null = unsafe { ffi::RSMPI_REQUEST_NULL };
        let mut control = Self {
            requests: vec![null; depth],
            buffers: ManuallyDrop::new(vec![vec![0; MAX_CONTROL_BYTES]; depth]),
            next: 0,
        };
        for index in 0..depth {
            control.post(world, index)?;
        }
        Ok(control)
    }

    fn post(&mut self, world: &MpiWorld, index: usize) -> Result<(), CommError> {
        let start = self.buffers[index].as_mut_ptr().cast::<c_void>();
        // SAFETY: the buffer has this size. It is neither accessed nor freed before the request is complete.
        let code = unsafe {
            ffi::MPI_Irecv(
                start,
                MAX_CONTROL_BYTES as c_int,
                ffi::RSMPI_UINT8_T,
                ffi::RSMPI_ANY_SOURCE,
                CONTROL_TAG,
                world.comm,
                &raw mut self.requests[index],
            )
        };
        check(code, "MPI_Irecv of a control message", None)
    }

    /// Returns the next control message and its sender, or `None` if no message has arrived.
    pub fn next(&mut self, world: &MpiWorld) -> Result<Option<(usize, Vec<u8>)>, CommError> {
        let index = self.next;
        let (mut there, mut status, mut len): (c_int, _, c_int) = (0, empty_status(), 0);
        // SAFETY: the pointers point to local variables and to a posted request.
        unsafe {
            let request = &raw mut self.requests[index];
            let code = ffi::MPI_Test(request, &raw mut there, &raw mut status);
            check(code, "MPI_Test of a control message", None)?;
            if there == 0 {
                return Ok(None);
            }
            call!(MPI_Get_count(
                &raw const status,
                ffi::RSMPI_UINT8_T,
                &raw mut len
            ))?;
        }
        let note = self.buffers[index][..len as usize].to_vec();
        self.post(world, index)?;
        self.next = (index + 1) % self.requests.len();
        Ok(Some((status.MPI_SOURCE as usize, note)))
    }

    /// Cancels the posted receives. After this, no rank may send control messages.
    pub fn finish(mut self) -> Result<(), CommError> {
        for request in &mut self.requests {
            let mut status = empty_status();
            // SAFETY: the request is a posted request.
            unsafe {
                call!(MPI_Cancel(request))?;
                call!(MPI_Wait(request, &raw mut status))?;
            }
        }
        drop(ManuallyDrop::into_inner(self.buffers));
        Ok(())
    }
}
