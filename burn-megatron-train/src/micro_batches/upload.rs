//! Uploads the tensors of a micro-batch to the device.

use std::sync::Arc;

use burn::tensor::{Device, Int, Tensor, TensorData};

use burn_megatron::model::Tokens;
use burn_megatron_data::{Batch, FurtherTokens};

/// Returns the values as a tensor `[rows, seq]`.
pub(super) fn matrix(values: &[i32], batch: &Batch, device: &Device) -> Tensor<2, Int> {
    Tensor::from_data(
        TensorData::new(values.to_vec(), [batch.rows, batch.seq]),
        device,
    )
}

/// Returns the targets of the rows, then the targets of each depth of multi-token prediction.
pub(crate) fn targets(batch: &Batch, device: &Device) -> Tensor<2, Int> {
    let further = batch.further().iter().map(FurtherTokens::targets);
    let all = [&batch.targets[..]].into_iter().chain(further);
    let rows = batch.rows * (1 + batch.further().len());
    let data = TensorData::new(all.collect::<Vec<_>>().concat(), [rows, batch.seq]);
    Tensor::from_data(data, device)
}

/// Returns the input of the model for token ids that are on the device.
pub(super) fn tokens(batch: &Batch, ids: Tensor<2, Int>) -> Tokens {
    Tokens {
        ids,
        documents: batch.documents.as_deref().map(Arc::from),
        sorted: Some(batch.sorted().clone()),
        router_step: None,
        nodes: None,
        shard: batch.shard.clone(),
        real: batch.real().cloned(),
        further: vec![],
    }
}

/// Returns the inputs of multi-token prediction, on the rank of the last stage.
pub(super) fn further_tokens(batch: &Batch, device: &Device) -> Vec<Tokens> {
    let of_depth = |own: &FurtherTokens| Tokens {
        sorted: Some(own.sorted().clone()),
        real: own.real().cloned(),
        ..matrix(own.tokens(), batch, device).into()
    };
    batch.further().iter().map(of_depth).collect()
}

/// The tensors of a micro-batch on the device, of shape `[rows, seq]`.
#[derive(Clone)]
pub(crate) struct DeviceBatch {
    pub ids: Tensor<2, Int>,
    /// The targets, on the last stage only.
    pub targets: Option<Tensor<2, Int>>,
}

impl DeviceBatch {
    pub fn new(batch: &Batch, is_last: bool, device: &Device) -> Self {
        Self {
            ids: matrix(batch.tokens(), batch, device),
            targets: is_last.then(|| targets(batch, device)),
        }
    }
}
