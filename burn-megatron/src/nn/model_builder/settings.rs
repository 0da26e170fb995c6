//! Settings of the layers that a model builder creates: kernels, FP8, adapters, recomputation.

use std::sync::Arc;

use burn::module::Param;
use burn::tensor::Tensor;
use burn_megatron_kernels::attention::{AttentionEngine, Heads, Window};
use parking_lot::MutexGuard;

use super::ModelBuilder;
use crate::kernel_selection::{KernelChoices, KernelSelection, Operation};
use crate::mesh::{Axis, Grid};
use crate::nn::arithmetic::LinearKernels;
use crate::nn::context::ContextGroups;
use crate::nn::fp8::{Fp8, Fp8Config, Fp8Layer, SplitOperands, WeightOwner};
use crate::nn::lora::{AdaptedLayer, LoraConfig, LoraLayers};
use crate::nn::moe::Routers;
use crate::nn::tp_comm_overlap;
use crate::nn::{AttentionLogits, BuildError, Recompute, RecomputeConfig, TpCommOverlapGroup};

impl ModelBuilder {
    /// Sets which operations of the model are fused. Call it on the root builder.
    ///
    /// # Errors
    ///
    /// [`BuildError::Kernels`] if a requested kernel is not available on the device.
    pub fn with_kernels(self, choices: &KernelChoices) -> Result<Self, BuildError> {
        let chosen = KernelSelection::new(choices, self.device(), self.compute)?;
        *self.shared.kernels.lock() = chosen;
        Ok(self)
    }

    /// Returns whether the layer uses the fused form of an operation.
    pub fn is_fused(&self, operation: Operation) -> bool {
        self.kernels().is_fused(operation)
    }

    /// Returns the settings of the layer's matrix products.
    pub fn linear_kernels(&self) -> LinearKernels {
        let kernels = self.kernels();
        LinearKernels {
            fused: kernels.is_fused(Operation::Linear),
            blas: kernels.blas(),
        }
    }

    /// Returns the selection of fused operations, for reading and changing. Do not hold the guard while a layer is
    /// built.
    pub fn kernels(&self) -> MutexGuard<'_, KernelSelection> {
        self.shared.kernels.lock()
    }

    /// Emulates the fusion requested by [`KernelChoices::epilogue_fusion`] with separate kernels if the device has no
    /// such epilogue, for any type and width. This allows verifying the layers on a CPU. Call it on the root builder.
    pub fn with_composed_epilogues(self) -> Self {
        Self {
            composes_epilogues: true,
            ..self
        }
    }

    /// Returns the engine of fused attention for these heads on this rank, values of `value_width` features, and this
    /// window. The engine is selected once per model. It is the requested engine, or else the [first usable
    /// engine](burn_megatron_kernels::attention::select_engine) on all ranks of the tensor axis.
    ///
    /// Collective over the tensor axis on GPUs in 16 bits, except for an [outline](Self::outline). Call it on all
    /// ranks, in the same order.
    ///
    /// # Errors
    ///
    /// [`BuildError::Kernels`] if the requested engine cannot be used. [`BuildError::Comm`] if the collective fails.
    pub fn attention_engine(
        &self,
        (heads, value_width): (Heads, usize),
        window: Option<Window>,
    ) -> Result<Arc<dyn AttentionEngine>, BuildError> {
        let mut engines = self.shared.engines.lock();
        let heads = (heads, value_width, window);
        let mut kernels = self.kernels();
        let ranks = (!self.is_outline).then(|| self.groups.tensor());
        engines.select(&mut kernels, ranks, (self.device(), self.compute), heads)
    }

    /// Returns the groups in which the ranks of the context axis exchange data, with groups of `neighbours` ranks.
    /// They are created once per model.
    ///
    /// Collective over the context axis: call it on all ranks, in the same order.
    ///
    /// # Errors
    ///
    /// [`BuildError::Comm`] if the collective fails.
    pub fn context_groups(&self, neighbours: usize) -> Result<ContextGroups, BuildError> {
        let mut made = self.shared.context_groups.lock();
        if let Some(groups) = made.get(&neighbours) {
            return Ok(groups.clone());
        }
        let groups = ContextGroups::new(self.groups.context(), neighbours)?;
        made.insert(neighbours, groups.clone());
        Ok(groups)
    }

    /// Returns the groups of hybrid context parallelism, in order of increasing size. They are created once per
    /// model.
    ///
    /// Collective over all ranks of the stage: call it on all of them, in the same order.
    ///
    /// # Errors
    ///
    /// [`BuildError::Comm`] if the collective fails.
    pub(in crate::nn) fn hybrid_context_groups(&self) -> Result<Vec<ContextGroups>, BuildError> {
        let mut made = self.shared.hybrid_context_groups.lock();
        if made.is_empty() {
            let all = self.groups.group(Grid::Dense, Grid::Dense.data_axes())?;
            *made = ContextGroups::powers_of_two(&all)?;
        }
        Ok(made.clone())
    }

    /// Sets the FP8 configuration of the linear layers of the model. Call it on the root builder.
    ///
    /// # Errors
    ///
    /// [`BuildError::Fp8`] for invalid settings. [`Fp8::check_layers`] checks later that each pattern matches a
    /// layer.
    pub fn with_fp8(self, config: &Fp8Config) -> Result<Self, BuildError> {
        *self.shared.fp8.lock() = Fp8::new(config)?;
        Ok(self)
    }

    /// Freezes the parameters of the model and adds adapters to its layers. `None` changes nothing. Call it on the
    /// root builder.
    ///
    /// ```
    /// use burn::tensor::Device;
    /// use burn_megatron::nn::lora::LoraConfig;
    /// use burn_megatron::nn::{Activation, ParallelMlpConfig};
    /// use burn_megatron::prelude::*;
    ///
    /// let lora = LoraConfig {
    ///     rank: 2,
    ///     target_modules: vec!["up_proj".into(), "down_proj".into()],
    ///     ..LoraConfig::default()
    /// };
    /// let builder = ModelBuilder::new(&ParallelContext::single(), &Device::flex());
    /// let builder = builder.with_lora(Some(&lora))?;
    /// let mlp = ParallelMlpConfig::new(8, 12, Activation::GeluTanh).init(&builder)?;
    /// let model = builder.finish(mlp)?;
    /// model.lora.unwrap().check_whole_model()?;
    /// // Each of the two adapters has a matrix of 8 x 2 and a matrix of 12 x 2 elements.
    /// assert_eq!(model.table.filtered(false).num_elements(), 2 * 2 * (8 + 12));
    /// # Ok::<(), AnyError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`BuildError::Config`] for invalid settings. [`LoraLayers::check_targets`] checks later that the model has
    /// each target.
    pub fn with_lora(self, config: Option<&LoraConfig>) -> Result<Self, BuildError> {
        let Some(config) = config else {
            return Ok(self);
        };
        config.check()?;
        *self.shared.lora.lock() = Some(LoraLayers {
            config: config.clone(),
            layers: vec![],
        });
        Ok(self)
    }

    /// Returns the settings of adapters, or `None` in a model without adapters.
    pub fn lora_config(&self) -> Option<LoraConfig> {
        let lora = self.shared.lora.lock();
        lora.as_ref().map(|lora| lora.config.clone())
    }

    /// Registers a layer that has an adapter.
    pub(in crate::nn) fn add_adapted(&self, layer: AdaptedLayer) {
        if let Some(lora) = &mut *self.shared.lora.lock() {
            lora.layers.push(layer);
        }
    }

    /// Returns this builder for parameters that are trained even in a model with adapters.
    pub(in crate::nn) fn trained(&self) -> Self {
        Self {
            is_adapter: true,
            ..self.clone()
        }
    }

    /// Returns whether parameters of this builder are frozen.
    pub(in crate::nn) fn freezes(&self) -> bool {
        !self.is_adapter && self.shared.lora.lock().is_some()
    }

    /// Wraps a value as a parameter. The parameter has a gradient unless it is frozen.
    pub(in crate::nn) fn param<const D: usize>(&self, value: Tensor<D>) -> Param<Tensor<D>> {
        let param = Param::from_tensor(value);
        if self.freezes() {
            param.set_require_grad(false)
        } else {
            param
        }
    }

    /// Sets the recomputation of activations in the backward. Call it on the root builder.
    ///
    /// # Errors
    ///
    /// [`BuildError::Recompute`] for invalid settings. [`Recompute::check_regions`] checks later that the model has
    /// the modules and layers in the settings.
    pub fn with_recompute(self, config: &RecomputeConfig) -> Result<Self, BuildError> {
        *self.shared.recompute.lock() = Recompute::new(config)?;
        Ok(self)
    }

    /// Returns the layers that the model recomputes.
    pub fn recompute(&self) -> Recompute {
        self.shared.recompute.lock().clone()
    }

    /// Returns this builder for layers that ignore their FP8 recipe and compute in the type of the model.
    pub fn without_fp8(&self) -> Self {
        Self {
            allows_fp8: false,
            ..self.clone()
        }
    }

    /// Returns this builder for layers with or without sequence parallelism. By default the layout decides.
    pub fn with_sequence_parallel(&self, sequence_parallel: bool) -> Self {
        Self {
            sequence_parallel,
            ..self.clone()
        }
    }

    /// Returns whether the activations between the layers are split along the sequence.
    pub fn sequence_parallel(&self) -> bool {
        self.sequence_parallel
    }

    /// Returns the tensor ranks if the exchanges of a linear layer are split into chunks that overlap its products.
    ///
    /// # Errors
    ///
    /// [`BuildError::Config`] if the layer uses FP8.
    pub(in crate::nn) fn overlapped_group(
        &self,
        layer: Option<&Fp8Layer>,
    ) -> Result<Option<TpCommOverlapGroup>, BuildError> {
        let layout = self.groups.config();
        let group = TpCommOverlapGroup::of_layout(layout, self.groups.tensor());
        let group = group.filter(|_| self.sequence_parallel);
        match (layer, layout.tp_comm_overlap.filter(|_| group.is_some())) {
            (Some(_), Some(method)) => Err(self.error(tp_comm_overlap::refuses_fp8(method))),
            _ => Ok(group),
        }
    }

    /// Returns the number that must divide the number of tokens of a sequence. The tensor ranks can then share a
    /// sequence, and the chunks of [`tp_comm_overlap`](crate::mesh::ParallelConfig::tp_comm_overlap) are equal.
    pub fn sequence_multiple(&self) -> usize {
        if self.sequence_parallel {
            tp_comm_overlap::sequence_multiple(self.groups.config())
        } else {
            1
        }
    }

    /// Returns the FP8 layers built so far.
    pub fn fp8(&self) -> Fp8 {
        self.shared.fp8.lock().clone()
    }

    /// Returns the routers built so far.
    pub fn routers(&self) -> &Routers {
        &self.shared.routers
    }

    /// Returns the attention layers built so far.
    pub fn attention_logits(&self) -> &AttentionLogits {
        &self.shared.attention_logits
    }

    /// Returns the FP8 arithmetic of the linear layer, if it has a recipe. `split` describes the operands that are
    /// split over the tensor axis.
    pub(in crate::nn) fn fp8_layer(
        &self,
        split: SplitOperands,
    ) -> Result<Option<Fp8Layer>, BuildError> {
        let fp8 = self.fp8();
        if !self.allows_fp8 {
            fp8.add_capable(&self.path);
            return Ok(None);
        }
        let owner = (split, WeightOwner::Layer);
        Ok(fp8.layer(&self.path, self.device(), self.groups.tensor(), owner)?)
    }

    /// Returns the FP8 arithmetic of each expert of the model in the product `name`, if it has a recipe. The number of
    /// an expert is the last part of its path. The result covers the experts of all ranks, so that the states do not
    /// depend on the layout. `split` describes the operands that are split over the expert-tensor axis.
    pub(in crate::nn) fn fp8_expert_layers(
        &self,
        name: &str,
        experts: usize,
        split: SplitOperands,
    ) -> Result<Vec<Option<Fp8Layer>>, BuildError> {
        let (fp8, path) = (self.fp8(), self.join(name));
        let paths = (0..experts).map(|expert| format!("{path}.{expert}"));
        if !self.allows_fp8 {
            paths.for_each(|path| _ = fp8.add_capable(&path));
            return Ok(vec![None; experts]);
        }
        let comm = self.groups.group(Grid::Expert, Axis::ExpertTensor)?;
        let owner = (split, WeightOwner::Experts);
        let layers = paths.map(|path| fp8.layer(&path, self.device(), &comm, owner));
        Ok(layers.collect::<Result<_, _>>()?)
    }
}
