//! Evaluation: a batch goes through all stages once, and nothing is recorded.

use burn::tensor::{Device, Tensor};

use super::super::schedule::{Action, ActionKind};
use super::link::Link;
use crate::collective::Comm;
use crate::comm::CommError;

/// Passes one batch through the stages, of which stage `s` lies on rank `placement[s]` of `comm`.
///
/// `run` runs a stage of this rank on what the stage before gave (none for the first one). The rank
/// of the last stage gets what that gave. Every rank must come, with batches in the same order.
///
/// # Errors
///
/// [`CommError`] when a rank is missing.
pub fn forward_only(
    placement: &[usize],
    comm: &Comm,
    device: &Device,
    mut run: impl FnMut(usize, Option<Tensor<3>>) -> Tensor<3>,
) -> Result<Option<Tensor<3>>, CommError> {
    let device = device.clone().inner();
    let mut link = Link::new(comm, &device);
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
                Some(link.receive(placement[stage - 1], &sent)?)
            }
        };
        let output = run(stage, input);
        match placement.get(stage + 1) {
            Some(next) if next != rank => {
                let action = Action::new(ActionKind::SendActivation, stage, 0);
                link.send(*next, &action, output)?;
            }
            _ => last = Some(output),
        }
    }
    link.finish()?;
    Ok(last)
}
