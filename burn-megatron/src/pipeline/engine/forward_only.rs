//! Evaluation: one forward of a batch through all stages, without autodiff.

use burn::tensor::{Device, Tensor};

use super::super::schedule::{Action, ActionKind};
use super::p2p::P2pChannel;
use crate::collective::Comm;
use crate::comm::CommError;

/// Runs one batch through the stages; stage `s` is on rank `placement[s]` of `comm`.
///
/// `run` runs a stage of this rank on the output of the previous stage (`None` for the first). The rank
/// of the last stage returns its output, the others `None`. Collective: call on all ranks of `comm`,
/// with the batches in the same order.
///
/// # Errors
///
/// [`CommError`] if a send or receive fails.
pub fn forward_only(
    placement: &[usize],
    comm: &Comm,
    device: &Device,
    mut run: impl FnMut(usize, Option<Tensor<3>>) -> Tensor<3>,
) -> Result<Option<Tensor<3>>, CommError> {
    let device = device.clone().inner();
    let mut channel = P2pChannel::new(comm, &device);
    let mut last = None;
    for (stage, rank) in placement.iter().enumerate() {
        if *rank != comm.rank() {
            continue;
        }
        let input = match stage {
            0 => None,
            _ if placement[stage - 1] == *rank => last.take(),
            _ => {
                let sent = Action::new(ActionKind::SendActivation, stage - 1, 0);
                Some(channel.receive(placement[stage - 1], &sent)?)
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
