//! Settings of the layers that a model builder creates: kernels, FP8, LoRA adapters and activation recomputation.

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
    /// Sets which operations of the model use fused kernels. Call this method on the root builder.
    ///
    /// # Errors
    ///
    /// [`BuildError::Kernels`] if a requested kernel is not available on the device.
    pub fn with_kernels(self, choices: &KernelChoices) -> Result<Self, BuildError> {
        let chosen = KernelSelection::new(choices, self.device(), self.compute)?;
        *self.shared.kernels.lock() = chosen;
        Ok(self)
    }

    /// Returns whether the layer uses the fused implementation of an operation.
    pub fn is_fused(&self, operation: Operation) -> bool {
        self.kernels().is_fused(operation)
    }

    /// Returns the kernel settings of the layer's matmuls.
    pub fn linear_kernels(&self) -> LinearKernels {
        let kernels = self.kernels();
        LinearKernels {
            fused: kernels.is_fused(Operation::Linear),
            blas: kernels.blas(),
        }
    }

    /// Locks the kernel selection for reading and changing. Release the returned guard before a layer is built.
    pub fn kernels(&self) -> MutexGuard<'_, KernelSelection> {
        self.shared.kernels.lock()
    }

    /// Emulates epilogue fusion with separate kernels, if [`KernelChoices::epilogue_fusion`] requests the fusion but
    /// the device does not support it. The emulation supports any dtype and width, and allows verifying the layers on a
    /// CPU. Call this method on the root builder.
    pub fn with_composed_epilogues(self) -> Self {
        Self {
            composes_epilogues: true,
            ..self
        }
    }

    /// Returns the engine of fused attention for the given heads of this rank, with `value_width` features per value
    /// and the given sliding window. The engine is selected once per model. If the kernel choices request an engine,
    /// this engine is used. Otherwise the result is the [first engine](burn_megatron_kernels::attention::select_engine)
    /// that all ranks of the tensor axis can use.
    ///
    /// For 16-bit dtypes on GPUs, this call is collective over the tensor axis: make it on all ranks, in the same
    /// order. It is not collective for an [outline](Self::outline).
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

    /// Returns the process groups of context parallelism, with groups of `neighbours` neighbouring ranks. The groups
    /// are created once per model.
    ///
    /// This call is collective over the context axis: make it on all ranks, in the same order.
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

    /// Returns the process groups of hybrid context parallelism, in order of increasing size. The groups are created
    /// once per model.
    ///
    /// This call is collective over all ranks of the stage: make it on all ranks, in the same order.
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

    /// Sets the FP8 configuration of the linear layers of the model. Call this method on the root builder.
    ///
    /// # Errors
    ///
    /// [`BuildError::Fp8`] if a setting is invalid. This method does not check that each pattern matches a layer.
    /// [`Fp8::check_layers`] checks this after the model is built.
    pub fn with_fp8(self, config: &Fp8Config) -> Result<Self, BuildError> {
        *self.shared.fp8.lock() = Fp8::new(config)?;
        Ok(self)
    }

    /// Freezes the parameters of the model and adds LoRA adapters to its layers. `None` changes nothing. Call this
    /// method on the root builder.
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
    /// // Each of the two adapters has a matrix with 8 x 2 elements and a matrix with 12 x 2 elements.
    /// assert_eq!(model.table.filtered(false).num_elements(), 2 * 2 * (8 + 12));
    /// # Ok::<(), AnyError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`BuildError::Config`] if a setting is invalid. This method does not check that the model has each target.
    /// [`LoraLayers::check_targets`] checks this after the model is built.
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

    /// Returns the LoRA settings, or `None` if the model has no LoRA adapters.
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

    /// Sets which activations are recomputed in the backward pass. Call this method on the root builder.
    ///
    /// # Errors
    ///
    /// [`BuildError::Recompute`] if a setting is invalid. This method does not check that the model has the modules and
    /// layers in the settings. [`Recompute::check_regions`] checks this after the model is built.
    pub fn with_recompute(self, config: &RecomputeConfig) -> Result<Self, BuildError> {
        *self.shared.recompute.lock() = Recompute::new(config)?;
        Ok(self)
    }

    /// Returns the registry of the layers whose activations are recomputed.
    pub fn recompute(&self) -> Recompute {
        self.shared.recompute.lock().clone()
    }

    /// Returns a copy of this builder whose layers ignore their FP8 recipe and compute in the dtype of the model.
    pub fn without_fp8(&self) -> Self {
        Self {
            allows_fp8: false,
            ..self.clone()
        }
    }

    /// Returns a copy of this builder that builds layers with or without sequence parallelism. By default the parallel
    /// layout determines whether sequence parallelism is enabled.
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

    /// Returns the tensor ranks if the collectives of a linear layer are split into chunks that overlap with its
    /// matmuls.
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

    /// Returns a number that must divide the sequence length. The tensor ranks can then share a sequence evenly, and
    /// the chunks of [`tp_comm_overlap`](crate::mesh::ParallelConfig::tp_comm_overlap) have equal sizes.
    pub fn sequence_multiple(&self) -> usize {
        if self.sequence_parallel {
            tp_comm_overlap::sequence_multiple(self.groups.config())
        } else {
            1
        }
    }

    /// Returns the registry of the FP8 layers, which contains the layers built so far.
    pub fn fp8(&self) -> Fp8 {
        self.shared.fp8.lock().clone()
    }

    /// Returns the registry of the MoE routers, which contains the routers built so far.
    pub fn routers(&self) -> &Routers {
        &self.shared.routers
    }

    /// Returns the registry of the attention layers, which contains the layers built so far.
    pub fn attention_logits(&self) -> &AttentionLogits {
        &self.shared.attention_logits
    }

    /// Returns the FP8 state of the linear layer, if the layer has a recipe. `split` describes the operands that are
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

    /// Returns the FP8 state of each expert of the model for the matmul `name`, if the expert has a recipe. The index
    /// of the expert is the last part of its path. The result covers the experts of all ranks, so that the states do
    /// not depend on the layout. `split` describes the operands that are split over the expert-tensor axis.
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
