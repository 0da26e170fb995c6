//! Evaluation with pipeline parallelism: the forward of one batch through all stages, without autodiff.

use burn::tensor::{Device, Tensor};

use super::super::schedule::{Action, ActionKind};
use super::p2p::{P2pCommunicator, P2pConfig, ShapeCache, ShapeKey};
use crate::collective::Comm;
use crate::comm::CommError;

/// The options of [`forward_only`].
#[derive(Clone, Debug, Default)]
pub struct ForwardOptions {
    /// The key that identifies the shapes of the activations: see [`Stage::shape_key`](super::Stage::shape_key). It
    /// must be the same on all ranks.
    pub shape_key: ShapeKey,
    /// The settings of the transfers between pipeline stages.
    pub p2p: P2pConfig,
    /// The cache of the activation shapes that earlier calls have recorded.
    pub shapes: ShapeCache,
}

/// Runs the forward of one batch through all pipeline stages. Stage `s` is on rank `placement[s]` of `comm`.
///
/// `run` is called for each stage of this rank, with the output of the previous stage as input (`None` for the first
/// stage). The rank of the last stage returns the output of this stage, and the other ranks return `None`. Collective:
/// call on all ranks of `comm`, with the batches in the same order.
///
/// # Errors
///
/// [`CommError`] if a send or receive fails. [`CommError::Mismatch`] if a shape differs from earlier batches
/// with the same key.
pub fn forward_only(
    placement: &[usize],
    comm: &Comm,
    device: &Device,
    options: ForwardOptions,
    mut run: impl FnMut(usize, Option<Tensor<3>>) -> Tensor<3>,
) -> Result<Option<Tensor<3>>, CommError> {
    let device = device.clone().inner();
    let receives = (1..placement.len())
        .filter(|stage| placement[*stage] == comm.rank() && placement[*stage - 1] != comm.rank());
    let receives = receives.map(|stage| {
        let action = Action::new(ActionKind::ReceiveActivation, stage, 0);
        (placement[stage - 1], action)
    });
    let keys = vec![options.shape_key];
    let settings = (options.p2p, options.shapes);
    let mut p2p = P2pCommunicator::new(comm, &device, settings, receives, keys);
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
                p2p.start_receive(placement[stage - 1], &action)?;
                Some(p2p.wait(&action)?)
            }
        };
        let output = run(stage, input);
        match placement.get(stage + 1) {
            Some(next) if next != rank => {
                let action = Action::new(ActionKind::SendActivation, stage, 0);
                p2p.send(*next, &action, output)?;
            }
            _ => last = Some(output),
        }
    }
    p2p.finish()?;
    Ok(last)
}
