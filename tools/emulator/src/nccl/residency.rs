//! Tracks which collectives are resident on a device at the same time, and detects deadlocks.
//!
//! A launch occupies one multiprocessor per CTA of its communicator. It becomes resident when its stream reaches it
//! and enough multiprocessors are free, and it stays resident until it is done. Ranks share the one emulated device,
//! but each rank has its own set of multiprocessors. The set belongs to the thread that launches. If one thread
//! created several ranks of a world, each of these ranks has its own set. A launch with only sends, or only receives,
//! occupies no multiprocessors: a program may have any number of pending messages.

use std::collections::BTreeSet;
use std::thread::{self, ThreadId};

use super::calls::Launch;
use super::operation::{Call, Kind};
use super::state::NcclState;
use super::{Failure, usage};
use crate::driver::MULTIPROCESSORS;

/// The multiprocessors that a launch occupies.
#[derive(Clone, Copy, Debug)]
pub(super) struct Residency {
    device: (ThreadId, usize),
    ctas: usize,
    pub resident: bool,
}

impl NcclState {
    /// Returns the multiprocessors that calls of this thread on a communicator will occupy.
    pub(super) fn residency(&self, handle: usize, calls: &[Call]) -> Result<Residency, Failure> {
        let comm = self.comm(handle)?;
        let same = self
            .comms
            .values()
            .filter(|other| (other.world, other.thread) == (comm.world, comm.thread));
        let number = if same.count() > 1 { comm.rank } else { 0 };
        let sends = calls
            .iter()
            .all(|call| matches!(call.kind, Kind::Send { .. }));
        let receives = calls
            .iter()
            .all(|call| matches!(call.kind, Kind::Receive { .. }));
        Ok(Residency {
            device: (thread::current().id(), number),
            ctas: if sends || receives {
                0
            } else {
                comm.settings.ctas
            },
            resident: false,
        })
    }

    /// Makes a launch that has arrived resident if there is enough space. Returns whether it is resident.
    pub(super) fn make_resident(&mut self, number: usize) -> bool {
        let Some(launch) = self.launches.get(&number) else {
            return false;
        };
        let Residency {
            device,
            ctas,
            resident,
        } = launch.residency;
        let fits = resident || ctas <= self.free(device, |_| true);
        if let Some(launch) = self.launches.get_mut(&number) {
            launch.residency.resident = fits;
        }
        fits
    }

    /// Returns the number of multiprocessors of a device that would be free if only `counted` launches were resident.
    fn free(&self, device: (ThreadId, usize), counted: impl Fn(usize) -> bool) -> usize {
        let there = self.launches.iter().filter(|(number, launch)| {
            let Residency {
                device: of,
                resident,
                ..
            } = launch.residency;
            resident && of == device && counted(**number)
        });
        let occupied: usize = there.map(|(_, launch)| launch.residency.ctas).sum();
        MULTIPROCESSORS.saturating_sub(occupied)
    }

    /// Marks worlds as failed if their launches wait for each other forever.
    pub(super) fn report_deadlock(&mut self) {
        let stuck = self.stuck();
        if stuck.is_empty() {
            return;
        }
        let launches = stuck.iter().filter_map(|number| self.launches.get(number));
        let worlds: BTreeSet<_> = launches.clone().map(|launch| launch.world).collect();
        let lines: Vec<_> = launches.map(|launch| self.tell(launch)).collect();
        let reason = format!("deadlock: {}", lines.join("; "));
        for world in worlds {
            self.fail(world, usage(reason.clone()));
        }
    }

    /// Returns the launches that can never end, independent of later calls. Starts with all launches, and removes
    /// launches that can continue even if the others do not.
    fn stuck(&self) -> BTreeSet<usize> {
        let mut stuck: BTreeSet<usize> = self.launches.keys().copied().collect();
        loop {
            let before = stuck.len();
            let may_go_on = |number: &usize| {
                self.launches
                    .get(number)
                    .is_none_or(|launch| self.may_go_on(*number, launch, &stuck))
            };
            stuck = stuck.iter().copied().filter(|n| !may_go_on(n)).collect();
            if stuck.len() == before {
                return stuck;
            }
        }
    }

    fn may_go_on(&self, number: usize, launch: &Launch, stuck: &BTreeSet<usize>) -> bool {
        let failed = self.worlds.get(&launch.world);
        if launch.aborted || failed.is_none_or(|world| world.error.is_some()) {
            return true;
        }
        if !launch.arrived {
            // The launch waits for earlier work on its stream, if this work was launched here.
            let before = stuck.range(..number);
            let mut before = before.filter_map(|number| self.launches.get(number));
            return before.all(|other| other.stream != launch.stream);
        }
        let Residency {
            device,
            ctas,
            resident,
        } = launch.residency;
        if !resident {
            return ctas <= self.free(device, |number| stuck.contains(&number));
        }
        let calls = launch
            .operations
            .iter()
            .filter_map(|operation| self.operations.get(operation))
            .flat_map(|operation| &operation.calls);
        // A side that has not called yet may still call.
        calls.flatten().all(|(_, other)| {
            let found = self.launches.get(other);
            !stuck.contains(other) || found.is_none_or(|launch| launch.residency.resident)
        })
    }

    fn tell(&self, launch: &Launch) -> String {
        let Residency { ctas, resident, .. } = launch.residency;
        let rank = self.comms.get(&launch.comm).map_or(0, |comm| comm.rank);
        let size = self.worlds.get(&launch.world).map_or(0, |world| world.size);
        let calls = launch.operations.iter().filter_map(|operation| {
            self.operations
                .get(operation)?
                .calls
                .iter()
                .flatten()
                .next()
        });
        let calls: Vec<_> = calls
            .map(|(call, _)| format!("{:?} of {} {:?}", call.kind, call.count, call.of))
            .collect();
        let what = match (resident, launch.arrived) {
            (true, _) => format!("occupies {ctas} of {MULTIPROCESSORS} multiprocessors"),
            (false, true) => format!("waits for {ctas} of {MULTIPROCESSORS} multiprocessors"),
            (false, false) => "waits on its stream".into(),
        };
        format!(
            "{} of rank {rank} of {size} in world {} {what}",
            calls.join(" and "),
            launch.world
        )
    }
}
