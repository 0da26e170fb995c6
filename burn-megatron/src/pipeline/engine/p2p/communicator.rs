//! Sends and receives of one rank, in the order of its schedule.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Once;

use burn::tensor::{Device, Tensor};

use super::super::super::schedule::{Action, ActionKind};
use super::shapes::{ShapeCache, ShapeKey, TensorMetadata, TensorSpec};
use super::{P2pConfig, fp8};
use crate::collective::messages::{self, PendingSend};
use crate::collective::{Comm, PendingPacked, PendingTensor};
use crate::comm::{CommError, DType};

/// The sends and receives of one rank during a run.
pub struct P2pCommunicator<'a> {
    comm: &'a Comm,
    device: Device,
    config: P2pConfig,
    shapes: ShapeCache,
    /// The shape key of each micro-batch.
    keys: Vec<ShapeKey>,
    /// The receives from each peer.
    incoming: BTreeMap<usize, Incoming>,
    /// Receives that were posted but not yet waited for.
    posted: HashMap<Action, PendingTransfer>,
    /// Peers to which activations are sent.
    outgoing: BTreeSet<usize>,
    sent: Vec<PendingSend>,
    /// The number of tensors sent to each peer.
    sent_to: HashMap<usize, u64>,
}

/// The receives from one peer, in the order of its sends.
#[derive(Default)]
struct Incoming {
    /// The receives that are not posted yet.
    waiting: VecDeque<Action>,
    /// The number of receives posted ahead of their position in the schedule.
    ahead: usize,
    /// The number of posted tensors.
    count: u64,
}

enum PendingTransfer {
    Plain(PendingTensor<3>),
    Fp8(PendingPacked, TensorSpec),
}

impl<'a> P2pCommunicator<'a> {
    /// Creates a communicator for the `transfers` of this rank in order, each with its peer. `keys` are the
    /// shape keys of the micro-batches.
    pub fn new(
        comm: &'a Comm,
        device: &Device,
        (config, shapes): (P2pConfig, ShapeCache),
        transfers: impl IntoIterator<Item = (usize, Action)>,
        keys: Vec<ShapeKey>,
    ) -> Self {
        let mut p2p = Self {
            comm,
            device: device.clone(),
            config,
            shapes,
            keys,
            incoming: BTreeMap::new(),
            posted: HashMap::new(),
            outgoing: BTreeSet::new(),
            sent: vec![],
            sent_to: HashMap::new(),
        };
        for (peer, action) in transfers {
            if action.kind.is_receive() {
                let incoming = p2p.incoming.entry(peer).or_default();
                incoming.waiting.push_back(action);
            } else if action.kind == ActionKind::SendActivation {
                p2p.outgoing.insert(peer);
            }
        }
        p2p.limit_receives_ahead();
        p2p
    }

    /// Returns the rank on the pipeline axis.
    pub fn rank(&self) -> usize {
        self.comm.rank()
    }

    /// Disables early receives if all work on the device would wait for them.
    fn limit_receives_ahead(&mut self) {
        static WARNING: Once = Once::new();
        let ahead = self.config.receives_ahead;
        if ahead == 0
            || self.incoming.is_empty()
            || messages::allows_early_receives(&self.device, self.comm)
        {
            return;
        }
        self.config.receives_ahead = 0;
        WARNING.call_once(|| {
            tracing::warn!(
                "receives_ahead = {ahead} is ignored: the engine orders calls on the device so that all work waits for \
                 a receive"
            );
        });
    }

    /// Compares the shape keys of the micro-batches with the shape keys of the neighboring ranks, and posts the first
    /// receives.
    pub fn begin(&mut self) -> Result<(), CommError> {
        self.compare_keys()?;
        let peers: Vec<usize> = self.incoming.keys().copied().collect();
        peers.into_iter().try_for_each(|peer| self.post_ahead(peer))
    }

    /// Starts sending the tensor of `action` to the rank `to`.
    pub fn send(&mut self, to: usize, action: &Action, x: Tensor<3>) -> Result<(), CommError> {
        let found = TensorSpec::of(&x);
        match self.known_spec(action) {
            Some(expected) if expected == found => {}
            Some(expected) => return Err(self.unexpected_shape(to, action, (found, expected))),
            None => self.send_metadata(to, action, found)?,
        }
        *self.sent_to.entry(to).or_default() += 1;
        let pending = if self.config.fp8 {
            messages::start_send_packed(fp8::encode(x), to, self.comm)?
        } else {
            messages::start_send(x, to, self.comm)?
        };
        self.sent.push(pending);
        // The gradient of an activation with a new shape can be received now.
        self.post_ahead(to)
    }

    /// Posts the receive `action` from rank `from`, unless it is already posted. Also posts receives that follow it, up
    /// to [`P2pConfig::receives_ahead`]. `action` must be the next receive from this rank.
    pub fn start_receive(&mut self, from: usize, action: &Action) -> Result<(), CommError> {
        if !self.posted.contains_key(action) {
            if self.known_spec(action).is_none() {
                self.receive_metadata(from, action)?;
            }
            self.post(from)?;
        }
        self.of(from).ahead -= 1;
        self.post_ahead(from)
    }

    /// Waits for the tensor of a receive that was [started](Self::start_receive).
    pub fn wait(&mut self, action: &Action) -> Result<Tensor<3>, CommError> {
        match self.posted.remove(action) {
            Some(PendingTransfer::Plain(pending)) => pending.try_wait(),
            Some(PendingTransfer::Fp8(pending, spec)) => Ok(fp8::decode(pending.try_wait()?, spec)),
            None => unreachable!("a valid schedule receives each tensor once, before its use"),
        }
    }

    /// Waits until all sends have completed.
    pub fn finish(&mut self) -> Result<(), CommError> {
        self.sent.drain(..).try_for_each(PendingSend::wait)
    }

    fn of(&mut self, peer: usize) -> &mut Incoming {
        self.incoming.entry(peer).or_default()
    }

    /// Returns the shape of the tensor of a transfer, if it is known: the shape of the activation between its
    /// two stages.
    fn known_spec(&self, action: &Action) -> Option<TensorSpec> {
        let (stage, key) = self.stage_and_key(action);
        self.shapes.get(stage, key)
    }

    /// Returns the stage that returns the activation of a transfer, and the key of the micro-batch.
    fn stage_and_key(&self, action: &Action) -> (usize, ShapeKey) {
        let stage = match action.kind {
            ActionKind::SendActivation | ActionKind::ReceiveGradient => action.stage,
            _ => action.stage - 1,
        };
        (stage, self.keys[action.micro_batch])
    }

    /// Posts receives from a peer up to the limit, or to the first receive with an unknown shape.
    fn post_ahead(&mut self, peer: usize) -> Result<(), CommError> {
        while let Some(incoming) = self.incoming.get(&peer)
            && incoming.ahead < self.config.receives_ahead
            && let Some(next) = incoming.waiting.front()
            && self.known_spec(next).is_some()
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
        let Some(spec) = self.known_spec(&action) else {
            unreachable!("a gradient follows its activation")
        };
        let (device, comm) = (&self.device, self.comm);
        let pending = if self.config.fp8 {
            let len = fp8::words(spec.shape);
            let pending = messages::start_receive_packed(peer, len, device, comm)?;
            PendingTransfer::Fp8(pending, spec)
        } else {
            let pending = messages::start_receive(peer, spec.shape, spec.dtype, device, comm)?;
            PendingTransfer::Plain(pending)
        };
        let incoming = self.of(peer);
        incoming.count += 1;
        incoming.ahead += 1;
        self.posted.insert(action, pending);
        Ok(())
    }

    fn send_metadata(
        &mut self,
        to: usize,
        action: &Action,
        spec: TensorSpec,
    ) -> Result<(), CommError> {
        let metadata = self.metadata(action, spec);
        self.shapes.insert(metadata.stage, metadata.key, spec);
        let pending = messages::start_send_numbers(metadata.to_numbers(), to, self.comm)?;
        self.sent.push(pending);
        Ok(())
    }

    fn receive_metadata(&mut self, from: usize, action: &Action) -> Result<(), CommError> {
        let numbers = self
            .comm
            .receive(from, DType::I64, TensorMetadata::LEN)?
            .into_vec::<i64>();
        let found = TensorMetadata::from_numbers(&numbers);
        match found {
            Some(found) if found == self.metadata(action, found.spec) => {
                self.shapes.insert(found.stage, found.key, found.spec);
                Ok(())
            }
            _ => {
                let sent = match found {
                    Some(found) => with_key(found.stage, found.micro_batch, found.key),
                    None => format!("{numbers:?}"),
                };
                let (stage, key) = self.stage_and_key(action);
                let wanted = with_key(stage, action.micro_batch, key);
                let count = self.of(from).count;
                Err(self.mismatch(count, (from, sent), (self.comm.rank(), wanted), KEYS))
            }
        }
    }

    fn metadata(&self, action: &Action, spec: TensorSpec) -> TensorMetadata {
        let (stage, key) = self.stage_and_key(action);
        TensorMetadata {
            stage,
            micro_batch: action.micro_batch,
            key,
            spec,
        }
    }

    /// Sends the keys of all micro-batches to the ranks that receive activations, and compares the keys of the
    /// ranks that send activations. With different shapes the ranks would wait for different messages.
    fn compare_keys(&mut self) -> Result<(), CommError> {
        let numbers: Vec<i64> = self.keys.iter().flatten().map(|n| *n as i64).collect();
        // Receives are started first: ranks may send to each other, and a send may wait for its receive.
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
            let pending = messages::start_send_numbers(numbers.clone(), *to, self.comm)?;
            self.sent.push(pending);
        }
        for (from, stage, pending) in started {
            let found: Vec<i64> = pending.wait()?.into_vec();
            let mut keys = found.chunks(2).zip(numbers.chunks(2)).enumerate();
            if let Some((micro_batch, (found, own))) = keys.find(|(_, (found, own))| found != own) {
                let sent = with_key(stage, micro_batch, found);
                let wanted = with_key(stage, micro_batch, own);
                return Err(self.mismatch(0, (from, sent), (self.comm.rank(), wanted), KEYS));
            }
        }
        Ok(())
    }

    /// Returns the error for a tensor whose shape differs from the other micro-batches with its key.
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
        let key = self.keys[action.micro_batch];
        let reason = format!(
            "the shapes differ, and micro-batches with the shape key {key:?} have one shape (Stage::shape_key)"
        );
        let own = self.comm.rank();
        self.mismatch(number, (own, of(found)), (to, of(expected)), &reason)
    }

    /// Returns a mismatch of two ranks of the pipeline axis, each with the tensor that it sends or expects.
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

/// The reason of a mismatch if two ranks of a pipeline read different data.
const KEYS: &str = "the shape keys of the micro-batches differ (Stage::shape_key)";

fn with_key(stage: usize, micro_batch: usize, key: impl std::fmt::Debug) -> String {
    format!("the activation of stage {stage}, micro-batch {micro_batch} with the shape key {key:?}")
}
