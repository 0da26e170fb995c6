//! Sends and receives of one rank, in the order of its schedule.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use burn::tensor::{Device, Tensor};

use super::super::super::schedule::{Action, ActionKind};
use super::shapes::{AgreedShapes, MicroBatchSize, ShapeNotice, TensorSpec};
use super::{TransferConfig, fp8};
use crate::collective::Comm;
use crate::collective::messages::{
    PendingPackedReceive, PendingReceive, PendingSend, allows_early_receives, start_receive,
    start_receive_packed, start_send, start_send_numbers, start_send_packed,
};
use crate::comm::{CommError, DType};

/// The transfers of one rank in a run.
pub struct P2pChannel<'a> {
    comm: &'a Comm,
    device: Device,
    config: TransferConfig,
    shapes: AgreedShapes,
    /// By micro-batch.
    sizes: Vec<MicroBatchSize>,
    /// By peer, what this rank receives from it.
    incoming: BTreeMap<usize, Incoming>,
    /// Receives that were started.
    posted: HashMap<Action, (TensorSpec, PendingTransfer)>,
    /// Peers to which activations are sent.
    outgoing: BTreeSet<usize>,
    sent: Vec<PendingSend>,
    /// By peer, the tensors sent to it.
    sent_to: HashMap<usize, u64>,
}

/// The receives from one peer, in the order in which it sends.
#[derive(Default)]
struct Incoming {
    /// Not posted.
    waiting: VecDeque<Action>,
    /// Posted before they were reached.
    ahead: usize,
    /// The number of the tensors that were posted.
    count: u64,
}

enum PendingTransfer {
    Plain(PendingReceive),
    Fp8(PendingPackedReceive),
}

impl<'a> P2pChannel<'a> {
    /// A channel for the `transfers` of this rank, each with its peer, in order; `sizes` are those of the micro-batches.
    pub fn new(
        comm: &'a Comm,
        device: &Device,
        (config, shapes): (TransferConfig, AgreedShapes),
        transfers: impl IntoIterator<Item = (usize, Action)>,
        sizes: Vec<MicroBatchSize>,
    ) -> Self {
        let ahead = match config.receives_ahead {
            0 => 0,
            _ if allows_early_receives(device, comm) => config.receives_ahead,
            ahead => {
                tracing::warn!(
                    "receives_ahead = {ahead} is 0 here: the engine orders calls on the device so that all work waits for a \
                     receive"
                );
                0
            }
        };
        let config = TransferConfig {
            receives_ahead: ahead,
            ..config
        };
        let mut channel = Self {
            comm,
            device: device.clone(),
            config,
            shapes,
            sizes,
            incoming: BTreeMap::new(),
            posted: HashMap::new(),
            outgoing: BTreeSet::new(),
            sent: vec![],
            sent_to: HashMap::new(),
        };
        for (peer, action) in transfers {
            if action.kind.is_receive() {
                let incoming = channel.incoming.entry(peer).or_default();
                incoming.waiting.push_back(action);
            } else if action.kind == ActionKind::SendActivation {
                channel.outgoing.insert(peer);
            }
        }
        channel
    }

    /// Compares the sizes of the micro-batches with those of the neighbours, if they are others than in the last run, and
    /// posts the first receives.
    pub fn begin(&mut self) -> Result<(), CommError> {
        if self.shapes.set_sizes(&self.sizes) {
            self.compare_sizes()?;
        }
        let peers: Vec<usize> = self.incoming.keys().copied().collect();
        peers.into_iter().try_for_each(|peer| self.post_ahead(peer))
    }

    /// Starts sending the tensor of `action` to the rank `to`.
    pub fn send(&mut self, to: usize, action: &Action, x: Tensor<3>) -> Result<(), CommError> {
        let found = TensorSpec::of(&x);
        match self.agreed(action) {
            Some(expected) if expected == found => {}
            Some(expected) => return Err(self.unexpected_shape(to, action, (found, expected))),
            None => self.send_notice(to, action, found)?,
        }
        *self.sent_to.entry(to).or_default() += 1;
        let pending = if self.config.fp8 {
            start_send_packed(fp8::encode(x), to, self.comm)?
        } else {
            start_send(x, to, self.comm)?
        };
        self.sent.push(pending);
        // The gradient of an activation whose shape is new can be received now.
        self.post_ahead(to)
    }

    /// Posts the receive `action` from the rank `from`, the next one from there, and others ahead of it.
    pub fn reach(&mut self, from: usize, action: &Action) -> Result<(), CommError> {
        if !self.posted.contains_key(action) {
            if self.agreed(action).is_none() {
                self.receive_notice(from, action)?;
            }
            self.post(from)?;
        }
        self.of(from).ahead -= 1;
        self.post_ahead(from)
    }

    /// Waits for the tensor of a receive that was [reached](Self::reach).
    pub fn take(&mut self, action: &Action) -> Result<Tensor<3>, CommError> {
        let Some((spec, pending)) = self.posted.remove(action) else {
            unreachable!("a valid schedule receives each tensor before its use")
        };
        match pending {
            PendingTransfer::Plain(pending) => pending.wait(spec.shape),
            PendingTransfer::Fp8(pending) => {
                Ok(fp8::decode(pending.wait()?, spec.shape, spec.dtype))
            }
        }
    }

    /// [`reach`](Self::reach), then [`take`](Self::take).
    pub fn receive(&mut self, from: usize, action: &Action) -> Result<Tensor<3>, CommError> {
        self.reach(from, action)?;
        self.take(action)
    }

    /// Whether a receive was started and not waited for.
    pub fn is_posted(&self, action: &Action) -> bool {
        self.posted.contains_key(action)
    }

    /// Whether receives are posted ahead, so that a tensor is waited for only when it is used.
    pub fn posts_ahead(&self) -> bool {
        self.config.receives_ahead > 0
    }

    /// Waits until all sends have completed.
    pub fn finish(&mut self) -> Result<(), CommError> {
        self.sent.drain(..).try_for_each(PendingSend::wait)
    }

    fn of(&mut self, peer: usize) -> &mut Incoming {
        self.incoming.entry(peer).or_default()
    }

    /// The shape of the tensor of a send or a receive, if it is known: that of the activation between its two stages.
    fn agreed(&self, action: &Action) -> Option<TensorSpec> {
        let (stage, size) = self.key(action);
        self.shapes.get(stage, size)
    }

    /// The stage that returns the activation of a transfer, and the size of the micro-batch.
    fn key(&self, action: &Action) -> (usize, MicroBatchSize) {
        let stage = match action.kind {
            ActionKind::SendActivation | ActionKind::ReceiveGradient => action.stage,
            _ => action.stage - 1,
        };
        (stage, self.sizes[action.micro_batch])
    }

    /// Posts receives from a peer up to the limit, or to the first of an unknown shape.
    fn post_ahead(&mut self, peer: usize) -> Result<(), CommError> {
        while let Some(incoming) = self.incoming.get(&peer)
            && incoming.ahead < self.config.receives_ahead
            && let Some(next) = incoming.waiting.front()
            && self.agreed(next).is_some()
        {
            self.post(peer)?;
        }
        Ok(())
    }

    /// Posts the next receive from a peer.
    fn post(&mut self, peer: usize) -> Result<(), CommError> {
        let Some(action) = self.of(peer).waiting.pop_front() else {
            unreachable!("receives run in the order of the schedule")
        };
        let Some(spec) = self.agreed(&action) else {
            unreachable!("a gradient follows its activation")
        };
        let pending = if self.config.fp8 {
            let len = fp8::words(spec.shape);
            PendingTransfer::Fp8(start_receive_packed(peer, len, &self.device, self.comm)?)
        } else {
            let (len, dtype) = (spec.elements(), spec.dtype);
            PendingTransfer::Plain(start_receive(peer, len, dtype, &self.device, self.comm)?)
        };
        let incoming = self.of(peer);
        incoming.count += 1;
        incoming.ahead += 1;
        self.posted.insert(action, (spec, pending));
        Ok(())
    }

    fn send_notice(
        &mut self,
        to: usize,
        action: &Action,
        spec: TensorSpec,
    ) -> Result<(), CommError> {
        let notice = self.notice(action, spec);
        self.shapes.insert(notice.stage, notice.size, spec);
        let pending = start_send_numbers(notice.to_numbers(), to, self.comm)?;
        self.sent.push(pending);
        Ok(())
    }

    fn receive_notice(&mut self, from: usize, action: &Action) -> Result<(), CommError> {
        let numbers = self.comm.receive(from, DType::I64, ShapeNotice::LEN)?;
        let numbers: Vec<i64> = numbers.into_vec();
        let found = ShapeNotice::from_numbers(&numbers);
        match found {
            Some(found) if found == self.notice(action, found.spec) => {
                self.shapes.insert(found.stage, found.size, found.spec);
                Ok(())
            }
            _ => {
                let sent = match found {
                    Some(found) => format!(
                        "the activation of stage {}, micro-batch {} of size {:?}",
                        found.stage, found.micro_batch, found.size
                    ),
                    None => format!("{numbers:?}"),
                };
                let (stage, size) = self.key(action);
                let wanted = format!(
                    "the activation of stage {stage}, micro-batch {} of size {size:?}",
                    action.micro_batch
                );
                let count = self.of(from).count;
                Err(self.mismatch(count, (from, sent), (self.comm.rank(), wanted), SIZES))
            }
        }
    }

    fn notice(&self, action: &Action, spec: TensorSpec) -> ShapeNotice {
        let (stage, size) = self.key(action);
        ShapeNotice {
            stage,
            micro_batch: action.micro_batch,
            size,
            spec,
        }
    }

    /// Sends the sizes of all micro-batches to the ranks that get activations, and compares those of the ranks that send
    /// some.
    fn compare_sizes(&mut self) -> Result<(), CommError> {
        let numbers: Vec<i64> = self.sizes.iter().flatten().map(|n| *n as i64).collect();
        // Receives first: ranks may send to each other, and a send may wait for its receive.
        let mut started = vec![];
        for (from, incoming) in &self.incoming {
            let mut receives = incoming.waiting.iter();
            let first = receives.find(|action| action.kind == ActionKind::ReceiveActivation);
            if let Some(first) = first {
                let pending = self.comm.start_receive(*from, DType::I64, numbers.len())?;
                started.push((*from, first.stage - 1, pending));
            }
        }
        for to in &self.outgoing {
            let pending = start_send_numbers(numbers.clone(), *to, self.comm)?;
            self.sent.push(pending);
        }
        for (from, stage, pending) in started {
            let found: Vec<i64> = pending.wait()?.into_vec();
            let pairs = found.chunks(2).zip(numbers.chunks(2)).enumerate();
            let mut differing = pairs.filter(|(_, (found, own))| found != own);
            if let Some((micro_batch, (found, own))) = differing.next() {
                let of = |size: &[i64]| {
                    format!(
                        "the activation of stage {stage}, micro-batch {micro_batch} of size {size:?}"
                    )
                };
                return Err(self.mismatch(
                    0,
                    (from, of(found)),
                    (self.comm.rank(), of(own)),
                    SIZES,
                ));
            }
        }
        Ok(())
    }

    /// The error for a tensor that is not as the micro-batches of its size were.
    fn unexpected_shape(
        &self,
        to: usize,
        action: &Action,
        (found, expected): (TensorSpec, TensorSpec),
    ) -> CommError {
        let what = match action.kind {
            ActionKind::SendGradient => "gradient of the input",
            _ => "activation",
        };
        let of = |spec: TensorSpec| {
            format!(
                "the {what} of stage {}, micro-batch {}: {spec}",
                action.stage, action.micro_batch
            )
        };
        let number = self.sent_to.get(&to).copied().unwrap_or_default();
        let own = self.comm.rank();
        let reason = "the shapes differ, and the micro-batches have one size (Stage::size)";
        self.mismatch(number, (own, of(found)), (to, of(expected)), reason)
    }

    /// A mismatch of two ranks of the pipeline axis, each with what it sends or expects.
    fn mismatch(
        &self,
        sequence: u64,
        (first, first_call): (usize, String),
        (second, second_call): (usize, String),
        reason: &str,
    ) -> CommError {
        let group = self.comm.group();
        CommError::Mismatch {
            group: group.to_string(),
            sequence,
            first_rank: group.ranks()[first],
            first_call,
            second_rank: group.ranks()[second],
            second_call,
            reason: reason.into(),
        }
    }
}

/// Two ranks of a pipeline read other data.
const SIZES: &str = "the sizes of the micro-batches differ";
