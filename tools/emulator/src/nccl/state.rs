//! The complete state of the library: communicators, their worlds, and pending operations.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::ffi::c_void;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::thread::{self, ThreadId};
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::calls::{Launch, Operation};
use super::memory::RegisteredMemory;
use super::{Code, Failure, IN_PROGRESS, SUCCESS, argument, usage};
use crate::driver::jobs;

/// `ncclUniqueId`.
pub(super) type Id = [u8; 128];

#[derive(Debug, Default)]
pub(super) struct NcclState {
    numbers: usize,
    ids: HashMap<Id, usize>,
    pub comms: BTreeMap<usize, Comm>,
    pub worlds: BTreeMap<usize, CommGroup>,
    pub launches: BTreeMap<usize, Launch>,
    pub operations: BTreeMap<usize, Operation>,
    pub pieces: RegisteredMemory,
}

/// The settings of a config.
#[derive(Clone, Copy, Debug)]
pub(super) struct Settings {
    pub blocking: bool,
    /// The number of multiprocessors that a collective occupies.
    pub ctas: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            blocking: true,
            // The maximum of all versions (`MAXCHANNELS`).
            ctas: 64,
        }
    }
}

/// A rank of a world.
#[derive(Debug)]
pub(super) struct Comm {
    pub world: usize,
    pub rank: usize,
    pub settings: Settings,
    /// The thread that created the communicator.
    pub thread: ThreadId,
    finalized: bool,
    /// The number of collectives that were called on the communicator.
    pub collectives: usize,
    /// The number of memory registrations with the communicator.
    pub registered: usize,
}

/// The ranks that share an id, or that one split created.
#[derive(Debug, Default)]
pub(super) struct CommGroup {
    pub size: usize,
    joined: BTreeSet<usize>,
    finalized: usize,
    left: usize,
    /// The error that every rank reports after a failure.
    pub error: Option<Failure>,
    /// Collectives that not all ranks have called, by number.
    pub collectives: BTreeMap<usize, usize>,
    /// Messages that only one side has called, by sender and receiver.
    pub messages: HashMap<(usize, usize), VecDeque<usize>>,
    /// The contributions of ranks to a host meeting that not all ranks have reached.
    meeting: Vec<Option<HostContribution>>,
}

/// The contribution of a rank to a host meeting.
#[derive(Clone, Debug)]
pub(super) enum HostContribution {
    Split {
        colour: i32,
        key: i32,
        settings: Settings,
        thread: ThreadId,
        place: usize,
    },
    Window {
        comm: usize,
        address: u64,
        bytes: usize,
        place: usize,
    },
}

static STATE: LazyLock<Mutex<NcclState>> = LazyLock::new(Mutex::default);
static BELL: Condvar = Condvar::new();

/// Locks the state. The driver must not be called while the lock is held, since the driver itself takes this lock.
pub(super) fn state() -> MutexGuard<'static, NcclState> {
    STATE.lock()
}

/// Wakes all waiting threads.
pub(super) fn ring() {
    BELL.notify_all();
}

/// Waits until nothing is in progress on a communicator, if it is blocking.
///
/// # Errors
/// Returns the failure of the communicator.
pub(super) fn wait(handle: usize) -> Result<(), Failure> {
    loop {
        let mut state = state();
        if !state.comm(handle)?.settings.blocking {
            return Ok(());
        }
        match state.progress(handle)? {
            SUCCESS => return Ok(()),
            IN_PROGRESS => {
                BELL.wait_for(&mut state, Duration::from_millis(1));
                drop(state);
            }
            code => {
                let reason = "a rank has failed, or is at odds with the others".into();
                return Err(Failure { code, reason });
            }
        }
        // Streams may have work that this thread waits for.
        jobs::wake();
    }
}

impl NcclState {
    pub(super) fn number(&mut self) -> usize {
        self.numbers += 1;
        self.numbers
    }

    pub(super) fn comm(&self, handle: usize) -> Result<&Comm, Failure> {
        let missing = || argument(format!("{handle:#x} is not a live communicator"));
        self.comms.get(&handle).ok_or_else(missing)
    }

    pub(super) fn comm_mut(&mut self, handle: usize) -> Result<&mut Comm, Failure> {
        let missing = || argument(format!("{handle:#x} is not a live communicator"));
        self.comms.get_mut(&handle).ok_or_else(missing)
    }

    /// Returns a world by its number.
    pub(super) fn world(&mut self, number: usize) -> Result<&mut CommGroup, Failure> {
        let missing = || argument("the communicator's world is gone");
        self.worlds.get_mut(&number).ok_or_else(missing)
    }

    /// Returns the result of `ncclCommGetAsyncError`.
    pub(super) fn progress(&self, handle: usize) -> Result<Code, Failure> {
        let comm = self.comm(handle)?;
        let Some(world) = self.worlds.get(&comm.world) else {
            return Ok(SUCCESS);
        };
        if let Some(error) = &world.error {
            return Ok(error.code);
        }
        let meets = world.meeting.get(comm.rank).is_some_and(Option::is_some);
        let flown = || self.launches.values().all(|launch| launch.comm != handle);
        let busy = world.joined.len() < world.size
            || meets
            || (comm.finalized && (world.finalized < world.size || !flown()));
        Ok(if busy { IN_PROGRESS } else { SUCCESS })
    }

    /// Returns a communicator that can be used.
    ///
    /// # Errors
    /// Returns an error if the communicator cannot be used now.
    pub(super) fn usable(&self, handle: usize) -> Result<&Comm, Failure> {
        let comm = self.comm(handle)?;
        match self.progress(handle)? {
            _ if comm.finalized => Err(usage("the communicator is finalized")),
            SUCCESS => Ok(comm),
            IN_PROGRESS => Err(argument("the call before is still in progress")),
            code => Err(Failure {
                code,
                reason: "the communicator has failed before".into(),
            }),
        }
    }

    fn new_comm(
        &mut self,
        world: usize,
        rank: usize,
        settings: Settings,
        thread: ThreadId,
    ) -> usize {
        let handle = self.number() << 4;
        self.comms.insert(
            handle,
            Comm {
                world,
                rank,
                settings,
                thread,
                finalized: false,
                collectives: 0,
                registered: 0,
            },
        );
        handle
    }

    fn new_world(&mut self, size: usize) -> usize {
        let number = self.number();
        let world = CommGroup {
            size,
            ..CommGroup::default()
        };
        self.worlds.insert(number, world);
        number
    }

    /// Joins the world of an id.
    pub(super) fn join(
        &mut self,
        id: &Id,
        rank: usize,
        size: usize,
        settings: Settings,
    ) -> Result<usize, Failure> {
        if rank >= size {
            return Err(argument(format!(
                "invalid rank {rank}: expected below {size}"
            )));
        }
        let number = match self.ids.get(id) {
            Some(number) => *number,
            None => {
                let number = self.new_world(size);
                self.ids.insert(*id, number);
                number
            }
        };
        let world = self.world(number)?;
        if world.size != size {
            return Err(argument(format!(
                "rank {rank} comes to a world of {size}, and others to one of {}",
                world.size
            )));
        }
        if !world.joined.insert(rank) {
            return Err(argument(format!("rank {rank} comes twice")));
        }
        if world.joined.len() == size {
            // An id can be used only once.
            self.ids.remove(id);
        }
        Ok(self.new_comm(number, rank, settings, thread::current().id()))
    }

    /// Adds the contribution of a rank to the next host meeting. The last rank to arrive executes the meeting.
    pub(super) fn meet(&mut self, handle: usize, brought: HostContribution) -> Result<(), Failure> {
        let comm = self.usable(handle)?;
        let (rank, of) = (comm.rank, comm.world);
        let world = self.world(of)?;
        world.meeting.resize(world.size, None);
        world.meeting[rank] = Some(brought);
        if let Some(all) = world.meeting.iter().cloned().collect::<Option<Vec<_>>>() {
            world.meeting.clear();
            if let Err(failure) = self.carry_out(&all) {
                self.fail(of, failure);
            }
        }
        Ok(())
    }

    fn carry_out(&mut self, all: &[HostContribution]) -> Result<(), Failure> {
        let splits = all
            .iter()
            .enumerate()
            .filter_map(|(rank, brought)| match brought {
                HostContribution::Split { colour, key, .. } => Some((*colour, *key, rank)),
                HostContribution::Window { .. } => None,
            });
        let mut splits: Vec<_> = splits.collect();
        match splits.len() {
            0 => return self.open_windows(all),
            some if some < all.len() => {
                return Err(usage("some ranks split, and others register a window"));
            }
            _ => {}
        }
        splits.sort();
        for part in splits.chunk_by(|a, b| a.0 == b.0) {
            let world = match part[0].0 {
                ..0 => None,
                _ => Some(self.new_world(part.len())),
            };
            for (index, (.., rank)) in part.iter().enumerate() {
                let HostContribution::Split {
                    settings,
                    thread,
                    place,
                    ..
                } = all[*rank]
                else {
                    continue;
                };
                let comm = match world {
                    None => 0,
                    Some(world) => {
                        self.world(world)?.joined.insert(index);
                        self.new_comm(world, index, settings, thread)
                    }
                };
                store(place, comm);
            }
        }
        Ok(())
    }

    fn open_windows(&mut self, all: &[HostContribution]) -> Result<(), Failure> {
        let lengths = all.iter().filter_map(|brought| match brought {
            HostContribution::Window { bytes, .. } => Some(*bytes),
            HostContribution::Split { .. } => None,
        });
        let lengths: BTreeSet<_> = lengths.collect();
        if lengths.len() > 1 {
            return Err(usage(format!(
                "windows of one call have lengths {lengths:?}"
            )));
        }
        for brought in all {
            if let HostContribution::Window {
                comm,
                address,
                bytes,
                place,
            } = *brought
            {
                let window = self.register(comm, address, bytes)?;
                store(place, window);
            }
        }
        Ok(())
    }

    /// Marks a world as failed and prints a line to standard error, unless the world has already failed.
    pub(super) fn fail(&mut self, world: usize, failure: Failure) {
        if let Some(world) = self.worlds.get_mut(&world)
            && world.error.is_none()
        {
            eprintln!("NCCL emulator: {}", failure.reason);
            world.error = Some(failure);
        }
        ring();
    }

    pub(super) fn finalize(&mut self, handle: usize) -> Result<(), Failure> {
        let comm = self.usable(handle)?;
        if comm.registered > 0 {
            return Err(usage("memory is still registered with the communicator"));
        }
        let world = comm.world;
        self.comm_mut(handle)?.finalized = true;
        self.world(world)?.finalized += 1;
        Ok(())
    }

    /// Removes a communicator. Its pending launches continue unless it is aborted.
    pub(super) fn remove(&mut self, handle: usize, abort: bool) -> Result<(), Failure> {
        let number = self.comm(handle)?.world;
        self.comms.remove(&handle);
        let world = self.world(number)?;
        world.left += 1;
        if world.left == world.size {
            self.worlds.remove(&number);
        }
        if abort {
            let own = |launch: &&mut Launch| launch.comm == handle;
            let launches = self.launches.values_mut();
            launches
                .filter(own)
                .for_each(|launch| launch.aborted = true);
            let failure = Failure {
                code: super::REMOTE_ERROR,
                reason: "a rank has aborted its communicator".into(),
            };
            self.fail(number, failure);
        }
        Ok(())
    }
}

/// Writes a value to an address that its owner reads on another thread.
fn store(place: usize, value: usize) {
    // SAFETY: the caller guarantees that the address is valid until nothing is in progress on its communicator.
    let place = unsafe { AtomicPtr::from_ptr(place as *mut *mut c_void) };
    place.store(value as *mut c_void, Ordering::Release);
}
