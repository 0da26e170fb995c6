//! Evaluation: one forward of a batch through all stages, without autodiff.

use burn::tensor::{Device, Tensor};

use super::super::schedule::{Action, ActionKind};
use super::transfers::{AgreedShapes, MicroBatchSize, P2pChannel, TransferConfig};
use crate::collective::Comm;
use crate::comm::CommError;

/// The transfers of a [`forward_only`].
#[derive(Clone, Debug, Default)]
pub struct ForwardTransfers {
    /// What decides the shapes of the activations, as [`Stage::size`](super::Stage::size) does; the same on all ranks.
    pub size: MicroBatchSize,
    /// How tensors are sent and received.
    pub config: TransferConfig,
    /// What earlier calls have agreed on.
    pub shapes: AgreedShapes,
}

/// Runs one batch through the stages; stage `s` is on rank `placement[s]` of `comm`.
///
/// `run` runs a stage of this rank on the output of the previous stage (`None` for the first). The rank
/// of the last stage returns its output, the others `None`. Collective: call on all ranks of `comm`,
/// with the batches in the same order.
///
/// # Errors
///
/// [`CommError`] if a send or receive fails; [`CommError::Mismatch`] for a shape that is not that of earlier batches of the
/// same size.
pub fn forward_only(
    placement: &[usize],
    comm: &Comm,
    device: &Device,
    transfers: ForwardTransfers,
    mut run: impl FnMut(usize, Option<Tensor<3>>) -> Tensor<3>,
) -> Result<Option<Tensor<3>>, CommError> {
    let device = device.clone().inner();
    let ForwardTransfers {
        size,
        config,
        shapes,
    } = transfers;
    let receives = (1..placement.len())
        .filter(|stage| placement[*stage] == comm.rank() && placement[*stage - 1] != comm.rank());
    let receives = receives.map(|stage| {
        let action = Action::new(ActionKind::ReceiveActivation, stage, 0);
        (placement[stage - 1], action)
    });
    let mut channel = P2pChannel::new(comm, &device, (config, shapes), receives, vec![size]);
    let mut last = None;
    for (stage, rank) in placement.iter().enumerate() {
        if *rank != comm.rank() {
            continue;
        }
        let input = match stage {
            0 => None,
            _ if placement[stage - 1] == *rank => last.take(),
            _ => {
                let action = Action::new(ActionKind::ReceiveActivation, stage, 0);
                Some(channel.receive(placement[stage - 1], &action)?)
            }
        };
        let output = run(stage, input);
        match placement.get(stage + 1) {
            Some(next) if next != rank => {
                let action = Action::new(ActionKind::SendActivation, stage, 0);
                channel.send(*next, &action, output)?;
            }
            _ => last = Some(output),
        }
    }
    channel.finish()?;
    Ok(last)
}
