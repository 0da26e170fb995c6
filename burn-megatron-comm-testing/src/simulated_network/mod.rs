//! A simulated network that slows down an engine, to measure the share of the communication that is hidden behind
//! computation.

mod link;
#[cfg(test)]
mod tests;

use std::mem;
use std::sync::Arc;
use std::time::Duration;

use burn_megatron_comm::{Buffer, BufferPool, Call, CommError, Communicator, Group, Pending};
pub use link::{Link, LinkError, Transfer, hidden_share};

/// A communicator whose calls take the time that their transfers need on a simulated [`Link`]. `start` returns
/// immediately. Waiting for a call blocks until the simulated transfer is complete and the wrapped engine has the
/// result.
///
/// The number of bytes of a transfer is the number of bytes that a ring algorithm sends. With `d` ranks and a complete
/// buffer of `n` bytes, an all_gather or a reduce_scatter sends `n(d-1)/d` bytes, and an all_reduce sends `2n(d-1)/d`
/// bytes. The latency is added only once for calls that are [started together](Communicator::start_all). A group of one
/// rank does not use the link.
///
/// A message begins to arrive as soon as its send and its receive have been started and all earlier messages have
/// arrived. The link is full duplex: it sends and receives at the same time.
///
/// With a virtual clock, each rank has its own time. In this case, a message begins to arrive when its receive is
/// started, and the link cannot send and receive at the same time.
///
/// On a link [with nodes](Link::with_nodes), a ring collective of a group that spans several nodes runs at the
/// bandwidth between nodes. An all-to-all uses the link inside the node and the link between nodes at the same time.
#[derive(Debug)]
pub struct SimulatedNetwork {
    inner: Arc<dyn Communicator>,
    link: Arc<Link>,
}

impl SimulatedNetwork {
    /// Wraps `inner` so that its calls take the transfer time of `link`. All communicators of one rank must share the
    /// same link.
    pub fn over(inner: Arc<dyn Communicator>, link: &Arc<Link>) -> Arc<dyn Communicator> {
        Arc::new(Self {
            inner,
            link: Arc::clone(link),
        })
    }
}

impl Communicator for SimulatedNetwork {
    fn group(&self) -> &Group {
        self.inner.group()
    }

    fn start(&self, call: Call, input: Buffer) -> Result<Pending, CommError> {
        Ok(self.start_all(vec![(call, input)])?.remove(0))
    }

    fn start_all(&self, calls: Vec<(Call, Buffer)>) -> Result<Vec<Pending>, CommError> {
        if self.size() == 1 {
            return self.inner.start_all(calls);
        }
        let mut latency = self.link.latency();
        let mut parts = Vec::with_capacity(calls.len());
        for (call, input) in &calls {
            call.check(self.group(), input)?;
            let part = TransferSize::of(call, self.group(), input, self.link.ranks_per_node());
            let time = mem::take(&mut latency) + self.link.transfer_time(&part)?;
            parts.push((part, time));
        }
        let started = self.inner.start_all(calls)?.into_iter();
        let started = started.zip(parts);
        started
            .map(|(pending, (part, time))| self.over_link(pending, part, time))
            .collect()
    }

    fn split(&self, name: &str, groups: &[Vec<usize>]) -> Result<Arc<dyn Communicator>, CommError> {
        Ok(Self::over(self.inner.split(name, groups)?, &self.link))
    }

    fn pool(&self) -> Option<&Arc<BufferPool>> {
        self.inner.pool()
    }

    fn begin_step(&self, step: u64) {
        self.inner.begin_step(step);
    }
}

impl SimulatedNetwork {
    /// Adds the transfer time of a started call to its handle.
    fn over_link(
        &self,
        pending: Pending,
        part: TransferSize,
        time: Duration,
    ) -> Result<Pending, CommError> {
        if part.arrives && !self.link.has_virtual_clock() {
            return self.link.arrival(self.group(), part, time, pending);
        }
        Ok(self
            .link
            .schedule(self.group(), &part, time)
            .pending(pending))
    }
}

/// The number of bytes that a call transfers.
struct TransferSize {
    op: &'static str,
    bytes: u64,
    /// Whether the bytes are received (true) or sent (false).
    arrives: bool,
    /// The number of bytes that are sent to or received from another node.
    between: u64,
    /// Whether all bytes are as slow as the link between nodes, as in a ring.
    in_step: bool,
}

impl TransferSize {
    /// Returns the number of bytes that a rank sends to the next rank with a ring algorithm (Patarasuk and Yuan 2009,
    /// doi:10.1016/j.jpdc.2008.09.002). For a receive, returns the number of bytes that arrive.
    fn of(call: &Call, group: &Group, input: &Buffer, ranks_per_node: usize) -> Self {
        let width = input.dtype().size_of() as u64;
        let (own, ranks) = (input.len() as u64 * width, group.size() as u64);
        let node = |index: usize| group.ranks()[index] / ranks_per_node;
        let is_near = |index: usize| node(index) == node(group.index());
        let neighbour = (group.index() + 1) % group.size();
        let bytes = match call {
            Call::AllReduce(_) => 2 * own * (ranks - 1) / ranks,
            Call::ReduceScatter(_) => own * (ranks - 1) / ranks,
            Call::AllGather => own * (ranks - 1),
            Call::AllToAll { send, .. } => own - send[group.index()] as u64 * width,
            Call::Broadcast { .. } | Call::Send { .. } => own,
            Call::Receive { dtype, len, .. } => {
                (*len as u64).saturating_mul(dtype.size_of() as u64)
            }
            Call::Barrier => 0,
        };
        let whole_if = |far: bool| if far { bytes } else { 0 };
        let between = match call {
            Call::AllToAll { send, .. } => {
                let far = send
                    .iter()
                    .enumerate()
                    .filter(|(index, _)| !is_near(*index));
                far.map(|(_, elements)| *elements as u64 * width).sum()
            }
            Call::Send { to: peer } | Call::Receive { from: peer, .. } => whole_if(!is_near(*peer)),
            _ => whole_if(!is_near(neighbour)),
        };
        Self {
            op: call.name(),
            bytes,
            arrives: matches!(call, Call::Receive { .. }),
            between,
            in_step: !matches!(
                call,
                Call::AllToAll { .. } | Call::Send { .. } | Call::Receive { .. }
            ) && !(0..group.size()).all(is_near),
        }
    }
}
