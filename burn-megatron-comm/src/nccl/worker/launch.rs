//! How calls are handed to NCCL.

use std::collections::{HashMap, HashSet};
use std::mem;

use super::super::driver::{Mark, Stream};
use super::super::item::Item;
use super::super::lane::{Lane, Queue, State};
use super::super::library::{Comm, Progress};
use super::staging::Taken;
use super::{Arc, Flight, Instant, Work, Worker, distinct};

/// Where a call works: its communicator, its stream, and the copy that follows, if one does: address to,
/// address from, bytes.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub comm: Comm,
    pub stream: Stream,
    pub copy_back: Option<(u64, u64, usize)>,
}

/// A call that NCCL is busy with.
pub(super) type Placed = (Item, Place);

impl Worker {
    /// Launches from the front of every queue.
    pub(super) fn launch_what_can_be(&mut self) {
        if let Some(failure) = self.shared.failure() {
            for work in mem::take(&mut self.waiting) {
                work.refuse(&failure);
            }
            return;
        }
        let mut busy = self.busy();
        for work in mem::take(&mut self.waiting) {
            let queues = work.queues();
            let blocked = queues.iter().any(|queue| busy.contains(queue));
            let ready = if blocked {
                Ok(false)
            } else {
                self.ready(&work)
            };
            busy.extend(queues);
            match ready {
                Ok(true) => {
                    self.moved_at = Instant::now();
                    self.launch(work);
                }
                Ok(false) => self.waiting.push_back(work),
                Err(reason) => self.fail(work, &reason),
            }
        }
    }

    /// The queues that NCCL is busy with.
    fn busy(&self) -> HashSet<Queue> {
        let items = self.launching.iter().flatten();
        let mut busy: HashSet<Queue> = items.map(|(item, _)| item.key.queue()).collect();
        let splitting = |lane: &Lane| matches!(lane.state, State::Split { .. });
        if self.lanes.values().any(splitting) || !self.leaving.is_empty() {
            busy.insert(Queue::Collectives);
        }
        busy
    }

    /// Whether all that the work needs is there; what is not is begun.
    ///
    /// # Errors
    /// Why it will never be.
    fn ready(&mut self, work: &Work) -> Result<bool, String> {
        let items = match work {
            Work::Split(split) => return self.lane_ready(split.parent, None),
            Work::Calls(items) => items,
        };
        let mut ready = true;
        for item in items {
            ready &= self.lane_ready(item.key, Some(item))?;
            ready &= item.memory_known()?;
        }
        Ok(ready && self.staging_ready(items))
    }

    fn launch(&mut self, work: Work) {
        let mut items = match work {
            Work::Split(split) => return self.split(split),
            Work::Calls(items) => items,
        };
        match self.enqueue(&mut items) {
            Ok(places) => self.launching.push(items.into_iter().zip(places).collect()),
            Err(reason) => {
                for item in items {
                    self.shared.fail(&item.fail(&reason));
                    item.leak();
                }
            }
        }
    }

    /// Puts calls on their streams, as one; NCCL may go on with that when this returns.
    fn enqueue(&self, items: &mut [Item]) -> Result<Vec<Place>, String> {
        let (library, driver) = (&self.shared.library, &self.shared.driver);
        let mut places = Vec::with_capacity(items.len());
        let mut addresses = Vec::with_capacity(items.len());
        let mut taken = Taken::default();
        for item in items.iter_mut() {
            let lane = self.lanes.get(&item.key);
            let Some((lane, comm)) = lane.and_then(|lane| Some((lane, lane.comm()?))) else {
                return Err(format!("there is no communicator {}", item.key.posted_as()));
            };
            let own = item.settle(lane.stream, self.copies, driver)?;
            let (used, copy_back) = self.through_staging(item, own, lane, &mut taken)?;
            addresses.push(used);
            places.push(Place {
                comm,
                stream: lane.stream,
                copy_back,
            });
        }
        library.group_start()?;
        let mut run = Ok(());
        for ((item, addresses), place) in items.iter().zip(addresses).zip(&places) {
            let (plan, comm, stream) = (&item.plan, place.comm, place.stream);
            for step in &plan.steps {
                // SAFETY: the memory has the lengths of the plan, and is kept until the stream has passed.
                let step = || unsafe { library.run(*step, plan, addresses, comm, stream) };
                run = run.and_then(|()| step());
            }
        }
        let ended = library.group_end();
        run.and(ended).map(|_| places)
    }

    /// Sets calls free that NCCL has put on their streams.
    pub(super) fn follow_launches(&mut self) {
        for placed in mem::take(&mut self.launching) {
            match self.all_launched(&placed) {
                Ok(false) => self.launching.push(placed),
                Ok(true) => {
                    self.moved_at = Instant::now();
                    self.fly(placed);
                }
                Err(reason) => self.fail_placed(placed, &reason),
            }
        }
    }

    fn all_launched(&self, placed: &[Placed]) -> Result<bool, String> {
        let mut launched = true;
        for comm in distinct(placed.iter().map(|(_, place)| place.comm)) {
            launched &= self.shared.library.poll(comm)? == Progress::Done;
        }
        Ok(launched)
    }

    fn fly(&mut self, placed: Vec<Placed>) {
        let marks = match self.mark(&placed) {
            Ok(marks) => marks,
            Err(reason) => return self.fail_placed(placed, &reason),
        };
        for (item, place) in placed {
            let done = marks[&place.stream].clone();
            item.launched(&done);
            self.flying.push_back(Flight {
                queue: item.key.queue(),
                item,
                comm: place.comm,
                done,
                failed: false,
            });
        }
    }

    /// The copies out of registered memory, and then a mark on every stream.
    fn mark(&self, placed: &[Placed]) -> Result<HashMap<Stream, Arc<Mark>>, String> {
        let driver = &self.shared.driver;
        for (_, place) in placed {
            if let Some((to, from, bytes)) = place.copy_back {
                // SAFETY: as of the copy before.
                unsafe { driver.copy(to, from, bytes, place.stream) }?;
            }
        }
        let streams = distinct(placed.iter().map(|(_, place)| place.stream)).into_iter();
        let mark = |stream| Ok((stream, Mark::behind(stream, driver)?));
        streams.map(mark).collect()
    }
}
