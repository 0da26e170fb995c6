//! The registry of the routers of a model, with the state that is updated and reported after a step, and saved in
//! checkpoints.

use std::fmt;
use std::sync::Arc;

use burn::tensor::{Device, Tensor, TensorData};
use burn_megatron_kernels::adamw::outcome::statistics_dtype;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::bias::ExpertBias;
use super::loss_kind::RouterLossKind;
use super::step::{RankLoad, RouterStep};
use crate::collective::{CollectiveOp, Comm, start};
use crate::comm::{CommError, ParallelContext, ReduceOp};
use crate::nn::of_all_stages::of_all_stages;

/// The registry of the MoE routers of a model on this rank, in build order. Clones share the registry.
#[derive(Clone, Default)]
pub struct Routers(Arc<Mutex<Vec<RegisteredRouter>>>);

/// A router of the model.
#[derive(Clone, Debug)]
pub(super) struct RegisteredRouter {
    pub reported: ReportedLayer,
    pub bias: Option<ExpertBias>,
    /// The path of the expert bias.
    pub bias_path: String,
}

/// Description of an MoE layer whose router reports the load and the losses of a step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReportedLayer {
    /// The path of the layer in the model.
    pub path: String,
    /// The pipeline stage that holds the layer.
    pub stage: usize,
    /// The number of experts of the layer.
    pub experts: usize,
    /// The kinds of router losses that the layer reports.
    pub losses: Vec<RouterLossKind>,
}

impl ReportedLayer {
    /// Returns the layers of all pipeline stages, ordered by stage. This call is collective over the pipeline axis.
    ///
    /// # Errors
    ///
    /// [`CommError`] if the collective fails.
    pub fn of_all_stages(
        routers: &Routers,
        groups: &ParallelContext,
    ) -> Result<Vec<Self>, CommError> {
        of_all_stages(&routers.layers(), |layer| layer.stage, groups)
    }

    /// Returns the number of values that the layer reports. The values are the load of each expert, the number of
    /// token-expert pairs, and the losses.
    pub fn width(&self) -> usize {
        self.experts + 1 + self.losses.len()
    }
}

impl Routers {
    pub(super) fn register(&self, router: RegisteredRouter) {
        self.0.lock().push(router);
    }

    /// Returns the MoE layers of this rank.
    pub fn layers(&self) -> Vec<ReportedLayer> {
        let all = self.0.lock();
        all.iter().map(|router| router.reported.clone()).collect()
    }

    /// Returns the path and the value of each expert bias of this rank.
    pub fn expert_biases(&self) -> Vec<(String, ExpertBias)> {
        let all = self.0.lock();
        let bias =
            |router: &RegisteredRouter| Some((router.bias_path.clone(), router.bias.clone()?));
        all.iter().filter_map(bias).collect()
    }

    /// Ends a training step. Pass `taken = true` if the optimizer step was not skipped. The expert biases are then
    /// updated with the load of all micro-batches of the step. A `Trainer` calls this method automatically. This call
    /// is collective: make it on all ranks of the pipeline stage, with the same `taken`, after all backward passes of
    /// the step.
    ///
    /// Panics (see [`raise`](crate::comm::raise)) if the collective fails.
    pub fn end_step(&self, step: &RouterStep, groups: &ParallelContext, taken: bool) {
        let layers = self.layers();
        if self.expert_biases().is_empty() {
            return;
        }
        let device = self.device();
        let reports = reduced_reports(step, &layers, &device, groups.stage());
        let taken = if taken { 1.0 } else { 0.0 };
        let taken = Tensor::full([1], taken, (&device, reports.dtype()));
        self.update_biases(&layers, &reports, &taken);
    }

    /// Updates the expert biases with the loads of `layers` in `reports`, which [`reduced_reports`] returned. The
    /// update is multiplied by `taken`, which is 0 for a skipped step and otherwise 1.
    pub fn update_biases(&self, layers: &[ReportedLayer], reports: &Tensor<1>, taken: &Tensor<1>) {
        for router in self.0.lock().iter() {
            let Some(bias) = &router.bias else { continue };
            let own = layers.iter().position(|layer| *layer == router.reported);
            let Some(own) = own else {
                unreachable!("the layers of all stages include the layers of this rank");
            };
            let before = layers[..own].iter().map(ReportedLayer::width).sum();
            let load = reports.clone().narrow(0, before, layers[own].experts);
            bias.update(load, taken.clone());
        }
    }

    fn device(&self) -> Device {
        let biases = self.expert_biases();
        biases
            .first()
            .map_or_else(Device::flex, |(_, bias)| bias.value().device())
    }
}

impl fmt::Debug for Routers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.lock().iter()).finish()
    }
}

/// Returns the loads and losses that `layers` report for a step, summed over the ranks of `comm`. There are
/// [`ReportedLayer::width`] values per layer, and the values of all layers are concatenated. A rank adds zeros for
/// layers of other pipeline stages. On GPUs the sums are computed in f32, and the loads are exact up to 2^24 tokens per
/// expert. This call is collective over `comm`.
pub fn reduced_reports(
    step: &RouterStep,
    layers: &[ReportedLayer],
    device: &Device,
    comm: &Comm,
) -> Tensor<1> {
    let dtype = statistics_dtype(device);
    let options = (device, dtype);
    let (loads, losses) = (step.loads(), step.losses());
    let mut parts = vec![];
    for layer in layers {
        match loads.get(&layer.path) {
            Some(RankLoad { tokens, pairs }) => {
                parts.push(tokens.clone().float().cast(dtype));
                parts.push(Tensor::from_data(
                    TensorData::new(vec![*pairs as f64], [1]),
                    options,
                ));
            }
            None => parts.push(Tensor::zeros([layer.experts + 1], options)),
        }
        for kind in &layer.losses {
            let sum = losses.get(&(layer.path.clone(), *kind));
            parts.push(sum.map_or_else(
                || Tensor::zeros([1], options),
                |sum| sum.clone().cast(dtype),
            ));
        }
    }
    let own = Tensor::cat(parts, 0);
    start(own, &CollectiveOp::AllReduce(ReduceOp::Sum), comm).wait()
}
