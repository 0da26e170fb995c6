//! The wrapper that trains a module with data parallelism: see [`DistributedDataParallel`].

use std::sync::Arc;

use burn::module::Module;
use burn::tensor::{Device, Tensor};

use super::bucket_step::{AfterStep, BucketShard};
use super::config::DataParallelConfig;
use super::error::DataParallelError;
use super::gradients::ModelParallelAllReduce;
use super::layout::BufferLayout;
use super::memory::MemoryPlan;
use super::memory_usage::MemoryUsage;
use super::offload::host_stepper::HostStepper;
use super::param_and_grad_buffers::ParamAndGradBuffers;
use super::replicas;
use super::running_state::unshared;
use super::segments::ShardSegment;
use super::stores::ParameterFiller;
use crate::comm::ParallelContext;
use crate::kernel_selection::KernelSelection;
use crate::mesh::Grid;
use crate::nn::fp8::Fp8;
use crate::nn::hook::{DeferringSink, detach_hooks, with_anchor};
use crate::nn::moe::Routers;
use crate::nn::{AttentionLogits, DropoutPosition, ParameterTable, Recompute};

mod build;
mod captured;
mod frozen;
mod gathered;
mod offload;
mod own_backward;
mod reduce;
mod running_states;
mod step;

/// The wrapper for data-parallel training: a module whose parameters and gradients are replicated or sharded over the
/// data axis.
///
/// The parameters of the wrapped module are placeholders. When a layer calls [`Param::val`](burn::module::Param::val),
/// a hook returns the value of the parameter. [`to_module`](Self::to_module) returns a module that holds the
/// parameters.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Tensor};
/// use burn_megatron::nn::ParallelModule;
/// use burn_megatron::prelude::*;
///
/// let layout = ParallelConfig::new().with_data(2);
/// let samples = World::threads(2)?.run(|rank| {
///     let groups = ParallelContext::new(&layout, &rank)?;
///     let model = ParallelModule::replicated(LinearConfig::new(4, 1).init(&Device::flex()));
///     let mut ddp = DistributedDataParallel::new(model, &groups)?;
///     let device = Device::flex().autodiff();
///     let x = Tensor::<2>::ones([3, 4], &device);
///     let loss = ddp.forward(&device, |model| model.forward(x).sum());
///     ddp.backward_last(loss);
///     let gradients = ddp.reduce(3)?; // 3 samples on this rank
///     ddp.check_replicas()?;
///     Ok::<_, AnyError>(gradients.tokens)
/// })?;
/// assert_eq!(samples, [6, 6]);
/// # Ok::<(), AnyError>(())
/// ```
#[derive(Debug)]
pub struct DistributedDataParallel<M> {
    module: M,
    /// The parameters that are trained.
    table: Arc<ParameterTable>,
    /// All parameters, in the order of the module.
    whole: Arc<ParameterTable>,
    position: DropoutPosition,
    groups: ParallelContext,
    pub(super) buffers: Arc<ParamAndGradBuffers>,
    model_parallel: ModelParallelAllReduce,
    shards: Vec<BucketShard>,
    unique_segments: Vec<ShardSegment>,
    /// See [`GradientCheck::shares`](super::gradient_check::GradientCheck::shares).
    measured_shares: Vec<(Grid, Tensor<1>)>,
    kernels: KernelSelection,
    fp8: Fp8,
    recompute: Recompute,
    routers: Routers,
    attention_logits: AttentionLogits,
    after_step: Option<AfterStep>,
    /// Steps offloaded buckets; `None` if no bucket is offloaded.
    host: Option<HostStepper>,
    /// See [`saved_frozen`](Self::saved_frozen).
    saves_frozen: bool,
    /// For each parameter of `whole`, whether it is a [running state](super::running_state).
    running: Vec<bool>,
}

impl<M: Module> DistributedDataParallel<M> {
    /// Returns the wrapped module. Outside of [`forward`](Self::forward), the module runs without autodiff for its
    /// parameters.
    ///
    /// Only `Param::val` returns the parameters of this module. Module visitors bypass the hooks and read placeholders,
    /// which are NaN. Use [`to_module`](Self::to_module) for visitors.
    pub fn module(&self) -> &M {
        &self.module
    }

    /// Returns the table of the trained parameters and their placement on the ranks. It contains all parameters except
    /// the [frozen](Self::frozen_table) parameters. Lists with one value per parameter, such as gradients, are in the
    /// order of this table.
    pub fn table(&self) -> &Arc<ParameterTable> {
        &self.table
    }

    /// Returns the kernel selection: the fused operations that the model uses.
    pub fn kernels(&self) -> &KernelSelection {
        &self.kernels
    }

    /// Returns the FP8 layers of the model.
    pub fn fp8(&self) -> &Fp8 {
        &self.fp8
    }

    /// Returns the layers that are recomputed in the backward.
    pub fn recompute(&self) -> &Recompute {
        &self.recompute
    }

    /// Returns the expert routers of the model.
    pub fn routers(&self) -> &Routers {
        &self.routers
    }

    /// Returns the attention layers of the model and their largest logits.
    pub fn attention_logits(&self) -> &AttentionLogits {
        &self.attention_logits
    }

    /// Returns the process groups of this rank.
    pub fn groups(&self) -> &ParallelContext {
        &self.groups
    }

    /// Returns the settings of data parallelism.
    pub fn config(&self) -> &DataParallelConfig {
        &self.buffers.plan.config
    }

    /// Returns the layout of the parameters and gradients in buckets.
    pub fn layout(&self) -> &BufferLayout {
        &self.buffers.plan.layout
    }

    /// Returns the gradient sink, which accumulates gradients. Use it in code that runs the backward itself.
    pub fn sink(&self) -> Arc<dyn DeferringSink> {
        self.buffers.clone()
    }

    /// Returns the current position in the random number streams of the module's dropout layers.
    pub fn position(&self) -> &DropoutPosition {
        &self.position
    }

    /// Returns the measured memory usage of this rank.
    pub fn usage(&self) -> &MemoryUsage {
        &self.buffers.plan.usage
    }

    /// Returns the planned memory of this rank, which is computed from the layout.
    ///
    /// # Errors
    ///
    /// [`DataParallelError::Memory`] if the number of bytes overflows.
    pub fn memory_plan(&self) -> Result<MemoryPlan, DataParallelError> {
        let trained = self.buffers.plan.memory()?;
        Ok(trained.plus(&self.frozen_memory()?))
    }

    /// Runs a forward with autodiff for the parameters of the module.
    ///
    /// `device` is the device of the inputs. The device may be given with or without autodiff.
    pub fn forward<T>(&self, device: &Device, body: impl FnOnce(&M) -> T) -> T {
        self.buffers.begin_forward(None);
        let device = device.clone().inner().autodiff();
        let anchor = Tensor::<1>::zeros([1], &device).require_grad();
        with_anchor(&anchor, || body(&self.module))
    }

    /// Runs the backward of `loss`, which must be a sum over tokens, and accumulates its gradients.
    ///
    /// Returns Burn's gradients of the other leaf tensors, such as inputs.
    pub fn backward(&self, loss: Tensor<1>) -> burn::tensor::Gradients {
        let _span = tracing::debug_span!("backward").entered();
        let leaves = loss.backward();
        self.buffers.gradients().tracker.end_backward();
        leaves
    }

    /// Runs the backward of the last micro-batch of a step. Since no forward follows, each bucket is reduced as soon as
    /// its gradients are final, while the backward continues.
    pub fn backward_last(&self, loss: Tensor<1>) -> burn::tensor::Gradients {
        self.buffers.gradients().end_forwards(None);
        self.backward(loss)
    }

    /// Returns a module without hooks that holds the [master weights](Self::parameters). Running states, such as the
    /// running mean of a batch norm, are averaged over the data axis. The averages also replace the running states in
    /// this wrapper. Collective: call on all ranks of the data axis.
    pub fn to_module(&self) -> M {
        let (mut trained, mut frozen) = (
            self.parameters().into_iter(),
            self.frozen_parameters().into_iter(),
        );
        let mut entries = self.whole.entries().iter();
        let values = std::iter::from_fn(|| {
            if entries.next()?.frozen {
                frozen.next()
            } else {
                trained.next()
            }
        });
        let module = detach_hooks(self.module.clone()).map(&mut ParameterFiller(values));
        if self.running.contains(&true) {
            unshared(&module)
        } else {
            module
        }
    }

    /// Replaces the parameters with the parameters of the module that `change` returns. FP8 weights are quantized again
    /// with the current scales of their layers. Collective: call on all ranks of the data axis, with the same change.
    /// With `fp8_param_gather`, also call it on all ranks of the tensor axis.
    pub fn update(&mut self, change: impl FnOnce(M) -> M) {
        let module = change(self.to_module());
        self.set_running_states(self.running_states_of(&module));
        self.set_parameters(&module);
    }

    /// Checks that all replicas of each parameter are bitwise equal, over the data, tensor and pipeline axes.
    /// Collective: call on all ranks.
    ///
    /// # Errors
    ///
    /// [`DataParallelError::ReplicaMismatch`] with a parameter that differs, and two ranks whose replicas differ.
    pub fn check_replicas(&self) -> Result<(), DataParallelError> {
        replicas::check(&self.buffers, &self.table, &self.groups)
    }
}
