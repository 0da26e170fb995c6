//! Calls on streams, and the matching of calls between ranks.

use super::operation::{Call, Kind, execute};
use super::residency::Residency;
use super::state::{NcclState, ring};
use super::{Failure, usage};
use crate::memory::Memory;

/// The calls of a group on one communicator.
#[derive(Debug)]
pub(super) struct Launch {
    pub comm: usize,
    pub world: usize,
    pub stream: usize,
    /// Whether the stream has reached the launch.
    pub arrived: bool,
    pub residency: Residency,
    pub operations: Vec<usize>,
    /// The number of calls that are not done.
    open: usize,
    pub aborted: bool,
}

/// A collective or a message: the call of each rank, or of the sender and the receiver, with its launch.
#[derive(Debug)]
pub(super) struct Operation {
    pub calls: Vec<Option<(Call, usize)>>,
}

impl NcclState {
    /// Registers the calls of a group on one communicator. Returns the launch to put on the stream.
    pub(super) fn launch(
        &mut self,
        handle: usize,
        stream: usize,
        calls: &[Call],
    ) -> Result<usize, Failure> {
        let comm = self.usable(handle)?;
        let (world, rank) = (comm.world, comm.rank);
        let residency = self.residency(handle, calls)?;
        let launch = self.number();
        let mut operations = vec![];
        for call in calls {
            let (operation, side) = match call.kind {
                Kind::Send { to } => (self.message(world, [rank, to], 0)?, 0),
                Kind::Receive { from } => (self.message(world, [from, rank], 1)?, 1),
                _ => (self.collective(handle)?, rank),
            };
            self.take_part(operation, side, *call, launch, world);
            operations.push(operation);
        }
        let open = operations.len();
        let new = Launch {
            comm: handle,
            world,
            stream,
            arrived: false,
            residency,
            operations,
            open,
            aborted: false,
        };
        self.launches.insert(launch, new);
        Ok(launch)
    }

    /// Returns the next collective of a communicator.
    fn collective(&mut self, handle: usize) -> Result<usize, Failure> {
        let comm = self.comm_mut(handle)?;
        let (number, world) = (comm.collectives, comm.world);
        comm.collectives += 1;
        let size = self.world(world)?.size;
        match self.world(world)?.collectives.get(&number) {
            Some(operation) => Ok(*operation),
            None => {
                let operation = self.new_operation(size);
                self.world(world)?.collectives.insert(number, operation);
                Ok(operation)
            }
        }
    }

    /// Returns the first message between two ranks in which this side has not taken part yet.
    fn message(&mut self, world: usize, ends: [usize; 2], side: usize) -> Result<usize, Failure> {
        let [from, to] = ends;
        let waits = |operation: &&usize| {
            let operation = self.operations.get(operation);
            operation.is_some_and(|operation| operation.calls[side].is_none())
        };
        let queue = self.worlds.get(&world);
        let queue = queue.and_then(|world| world.messages.get(&(from, to)));
        if let Some(operation) = queue.into_iter().flatten().find(waits) {
            return Ok(*operation);
        }
        let operation = self.new_operation(2);
        let queue = self.world(world)?.messages.entry((from, to));
        queue.or_default().push_back(operation);
        Ok(operation)
    }

    fn new_operation(&mut self, parts: usize) -> usize {
        let number = self.number();
        let calls = vec![None; parts];
        self.operations.insert(number, Operation { calls });
        number
    }

    /// Registers the call of one side. The calls of all sides must match.
    fn take_part(&mut self, number: usize, side: usize, call: Call, launch: usize, world: usize) {
        let Some(operation) = self.operations.get_mut(&number) else {
            return;
        };
        operation.calls[side] = Some((call, launch));
        let sides = operation.calls.iter().enumerate();
        let mut others = sides.filter_map(|(other, found)| Some((other, found.as_ref()?.0)));
        let unfit = others.find(|(_, other)| !other.fits(&call));
        let complete = operation.calls.iter().all(Option::is_some);
        if let Some((other, found)) = unfit {
            let tell = |call: &Call| format!("{:?} of {} {:?}", call.kind, call.count, call.of);
            let reason = format!(
                "ranks do not fit together: {} on side {side}, {} on side {other}",
                tell(&call),
                tell(&found)
            );
            self.fail(world, usage(reason));
        }
        if complete && let Some(world) = self.worlds.get_mut(&world) {
            world
                .collectives
                .retain(|_, operation| *operation != number);
            for queue in world.messages.values_mut() {
                queue.retain(|operation| *operation != number);
            }
        }
    }

    /// Attempts a launch at the head of a stream. Returns whether the stream may continue.
    ///
    /// # Errors
    /// Returns an address outside of the device memory.
    pub(super) fn attempt(&mut self, number: usize, memory: &Memory) -> Result<bool, String> {
        let Some(launch) = self.launches.get_mut(&number) else {
            return Ok(true);
        };
        launch.arrived = true;
        let world = self.worlds.get(&launch.world);
        if launch.aborted || world.is_some_and(|world| world.error.is_some()) {
            self.drop_launch(number);
            return Ok(true);
        }
        if !self.make_resident(number) {
            self.report_deadlock();
            return Ok(false);
        }
        let operations = self.launches.get(&number);
        let operations = operations.map_or(vec![], |launch| launch.operations.clone());
        for operation in operations {
            if let Some(calls) = self.ready(operation) {
                self.operations.remove(&operation);
                let (calls, launches): (Vec<_>, Vec<_>) = calls.into_iter().unzip();
                for launch in launches {
                    if let Some(launch) = self.launches.get_mut(&launch) {
                        launch.open -= 1;
                    }
                }
                execute(&calls, memory)?;
            }
        }
        let done = self
            .launches
            .get(&number)
            .is_none_or(|launch| launch.open == 0);
        if done {
            self.drop_launch(number);
        } else {
            self.report_deadlock();
        }
        Ok(done)
    }

    fn drop_launch(&mut self, number: usize) {
        self.launches.remove(&number);
        ring();
    }

    /// Returns the calls of an operation if all of them are resident.
    fn ready(&self, operation: usize) -> Option<Vec<(Call, usize)>> {
        let calls = &self.operations.get(&operation)?.calls;
        let calls = calls.iter().copied().collect::<Option<Vec<_>>>()?;
        let here = |launch: &usize| {
            let launch = self.launches.get(launch);
            launch.is_some_and(|launch| launch.residency.resident)
        };
        calls
            .iter()
            .all(|(_, launch)| here(launch))
            .then_some(calls)
    }
}
