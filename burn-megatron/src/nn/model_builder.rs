//! The model builder, which creates and declares the parameters of a model.

mod settings;

use std::collections::BTreeMap;
use std::fmt::Display;
use std::sync::Arc;

use burn::module::{Module, Param};
use burn::tensor::{DType, Device, Tensor, TensorData};
use parking_lot::Mutex;

use super::attention_engine::AttentionEngines;
use super::context::ContextGroups;
use super::fp8::Fp8;
use super::init::stream_key;
use super::lora::LoraLayers;
use super::moe::Routers;
use super::{
    AttentionLogits, AxisRank, BuildError, DropoutPosition, ParameterEntry, ParameterSpec,
    ParameterTable, Recompute,
};
use crate::comm::ParallelContext;
use crate::kernel_selection::{KernelChoices, KernelSelection};

/// A builder for the parameters of a model. Layers use it to create their parameters. [`ModelBuilder::child`] returns
/// the builder of a submodule.
///
/// When a layer creates a parameter, it also declares how the parameter is split over the ranks. The parameter table of
/// the model ([`ModelBuilder::finish`]) is therefore always complete.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::Device;
/// use burn_megatron::prelude::*;
///
/// let config = LinearConfig::new(4, 2);
/// let builder = ModelBuilder::new(&ParallelContext::single(), &Device::flex());
/// assert_eq!(builder.child("blocks").child(0).path(), "blocks.0");
/// let linear = builder.replicated(|device| config.init(device));
/// let model = builder.finish(linear)?;
/// assert_eq!(model.table.num_elements(), 4 * 2 + 2);
///
/// // `finish` returns an error if a parameter was not created by the builder.
/// let builder = ModelBuilder::new(&ParallelContext::single(), &Device::flex());
/// let error = builder.finish(config.init(&Device::flex())).unwrap_err();
/// assert!(error.to_string().contains("weight, bias"));
/// # Ok::<(), AnyError>(())
/// ```
#[derive(Clone, Debug)]
pub struct ModelBuilder {
    shared: Arc<BuilderShared>,
    groups: ParallelContext,
    path: String,
    /// See [`with_pipeline_copies`](Self::with_pipeline_copies).
    pub(super) pipeline_copies: Vec<usize>,
    /// The pipeline stage of the parameters.
    pub(super) stage: usize,
    /// The dtype in which the model computes.
    compute: DType,
    /// Whether layers may use their FP8 recipe.
    allows_fp8: bool,
    /// Whether the activations between the layers are split along the sequence.
    sequence_parallel: bool,
    /// Whether parameters are placeholders that use no memory.
    is_outline: bool,
    /// See [`with_composed_epilogues`](Self::with_composed_epilogues).
    pub(super) composes_epilogues: bool,
    /// Whether parameters are trained even in a model with LoRA adapters.
    is_adapter: bool,
}

#[derive(Debug)]
struct BuilderShared {
    device: Device,
    dtype: DType,
    seed: u64,
    position: DropoutPosition,
    kernels: Mutex<KernelSelection>,
    engines: Mutex<AttentionEngines>,
    /// The context groups, keyed by the number of neighbours in a group.
    context_groups: Mutex<BTreeMap<usize, ContextGroups>>,
    /// The hybrid context groups, in order of increasing size.
    hybrid_context_groups: Mutex<Vec<ContextGroups>>,
    fp8: Mutex<Fp8>,
    recompute: Mutex<Recompute>,
    routers: Routers,
    attention_logits: AttentionLogits,
    lora: Mutex<Option<LoraLayers>>,
    declared: Mutex<Vec<ParameterEntry>>,
}

/// Creates a tensor of this shape that uses the memory of a single element. The element is NaN, so that accidental
/// reads of a placeholder are visible.
pub(crate) fn placeholder<const D: usize>(
    shape: [usize; D],
    options: (&Device, DType),
) -> Tensor<D> {
    if shape.contains(&0) {
        return Tensor::empty(shape, options);
    }
    let one = Tensor::<1>::full([1], f64::NAN, options);
    one.reshape([1; D]).expand(shape)
}

/// A Burn module together with its parameter table, and the settings and registries of its layers.
#[derive(Clone, Debug)]
pub struct ParallelModule<M> {
    /// The module, with this rank's part of each parameter.
    pub module: M,
    /// The parameter table.
    pub table: ParameterTable,
    /// The current step and sample, which determine the dropout masks.
    pub position: DropoutPosition,
    /// The selection of a fused or unfused implementation for each operation.
    pub kernels: KernelSelection,
    /// The layers that use FP8.
    pub fp8: Fp8,
    /// The layers whose activations are recomputed in the backward pass.
    pub recompute: Recompute,
    /// The routers of MoE layers.
    pub routers: Routers,
    /// The attention layers, and their largest logits.
    pub attention_logits: AttentionLogits,
    /// The LoRA adapters of the model. `None` if the model has no LoRA adapters.
    pub lora: Option<LoraLayers>,
}

impl<M: Module> ParallelModule<M> {
    /// Wraps a module that is replicated on every rank, such as a burn-nn module.
    pub fn replicated(module: M) -> Self {
        let table = ParameterTable::replicated(&module);
        let device = module.devices().into_iter().next();
        let kernels = automatic_kernels(&device.unwrap_or_else(Device::flex), DType::F32);
        Self {
            kernels,
            module,
            table,
            position: DropoutPosition::default(),
            fp8: Fp8::default(),
            recompute: Recompute::default(),
            routers: Routers::default(),
            attention_logits: AttentionLogits::default(),
            lora: None,
        }
    }

    /// Sets the FP8 layers of a module that contains [`Fp8Linear`](super::fp8::Fp8Linear) layers. The path of each
    /// layer must be its path in the module. A [`ModelBuilder`] sets the FP8 layers automatically.
    pub fn with_fp8(mut self, fp8: &Fp8) -> Self {
        self.fp8 = fp8.clone();
        self
    }
}

/// The default kernel selection.
fn automatic_kernels(device: &Device, dtype: DType) -> KernelSelection {
    match KernelSelection::new(&KernelChoices::default(), device, dtype) {
        Ok(chosen) => chosen,
        Err(error) => unreachable!("the default choices are valid on every device: {error}"),
    }
}

impl ModelBuilder {
    /// Creates the builder of a model with f32 parameters and seed 0.
    pub fn new(groups: &ParallelContext, device: &Device) -> Self {
        Self::with(groups, device, 0, DType::F32)
    }

    /// Creates the builder of a model with the given seed, whose parameters have the dtype `dtype`.
    pub fn with(groups: &ParallelContext, device: &Device, seed: u64, dtype: DType) -> Self {
        let shared = BuilderShared {
            device: device.clone(),
            dtype,
            seed,
            position: DropoutPosition::default(),
            kernels: Mutex::new(automatic_kernels(device, dtype)),
            engines: Mutex::default(),
            context_groups: Mutex::default(),
            hybrid_context_groups: Mutex::default(),
            fp8: Mutex::default(),
            recompute: Mutex::default(),
            routers: Routers::default(),
            attention_logits: AttentionLogits::default(),
            lora: Mutex::default(),
            declared: Mutex::default(),
        };
        Self {
            shared: Arc::new(shared),
            groups: groups.clone(),
            path: String::new(),
            pipeline_copies: vec![],
            stage: 0,
            compute: dtype,
            allows_fp8: true,
            sequence_parallel: groups.config().sequence_parallel,
            is_outline: false,
            composes_epilogues: false,
            is_adapter: false,
        }
    }

    /// Sets the dtype in which the model computes, if it differs from the dtype of the parameters. Call this method on
    /// the root builder, before [`with_kernels`](Self::with_kernels).
    pub fn with_compute_dtype(mut self, dtype: DType) -> Self {
        self.compute = dtype;
        *self.shared.kernels.lock() = automatic_kernels(self.device(), dtype);
        self
    }

    /// Creates the parameters as placeholders, which have shapes but no values or memory, like tensors on PyTorch's
    /// meta device. Call this method on the root builder.
    pub fn outline(self) -> Self {
        Self {
            is_outline: true,
            ..self
        }
    }

    /// Returns the dtype in which the model computes.
    pub fn compute_dtype(&self) -> DType {
        self.compute
    }

    /// Returns whether parameters are placeholders. See [`outline`](Self::outline).
    pub fn is_outline(&self) -> bool {
        self.is_outline
    }

    /// Returns the builder of the submodule in the field or list element `name`.
    pub fn child(&self, name: impl Display) -> Self {
        Self {
            path: self.join(name),
            ..self.clone()
        }
    }

    /// Returns a copy of this builder that uses the process groups `groups`.
    pub fn with_groups(&self, groups: ParallelContext) -> Self {
        Self {
            groups,
            ..self.clone()
        }
    }

    /// Returns a copy of this builder for parameters that have a copy on each of the pipeline ranks `ranks`, such as a
    /// tied embedding. `ranks` must include this rank. See [`ParameterEntry::pipeline_copies`].
    pub fn with_pipeline_copies(&self, ranks: impl IntoIterator<Item = usize>) -> Self {
        let mut ranks: Vec<_> = ranks.into_iter().collect();
        ranks.sort_unstable();
        ranks.dedup();
        // A single copy needs no list.
        let pipeline_copies = if ranks.len() > 1 { ranks } else { vec![] };
        Self {
            pipeline_copies,
            ..self.clone()
        }
    }

    /// Returns a copy of this builder for the parameters of pipeline stage `stage`.
    pub fn in_stage(&self, stage: usize) -> Self {
        Self {
            stage,
            ..self.clone()
        }
    }

    /// Returns the process groups.
    pub fn groups(&self) -> &ParallelContext {
        &self.groups
    }

    /// Returns the device of the parameters.
    pub fn device(&self) -> &Device {
        &self.shared.device
    }

    /// Returns the dtype of the parameters.
    pub fn dtype(&self) -> DType {
        self.shared.dtype
    }

    /// Returns this rank's position on the tensor axis.
    pub fn place(&self) -> AxisRank {
        self.groups.place()
    }

    /// Returns the path of the module that this builder builds, relative to the root of the model.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Returns the current step and sample, which determine the dropout masks.
    pub fn position(&self) -> &DropoutPosition {
        &self.shared.position
    }

    /// Returns the seed of the model.
    pub(super) fn seed(&self) -> u64 {
        self.shared.seed
    }

    /// Returns the key of the module's random number stream, which is computed from the seed and the path of the
    /// module.
    pub fn stream_key(&self) -> u64 {
        stream_key(self.shared.seed, &self.path)
    }

    /// Creates a [`BuildError::Config`] with the path of the module.
    pub fn error(&self, message: impl Into<String>) -> BuildError {
        BuildError::Config {
            path: self.path.clone(),
            message: message.into(),
        }
    }

    /// Creates the parameter in the field `name` of the module, and declares it in the parameter table.
    pub fn parameter<const D: usize>(
        &self,
        name: &str,
        spec: ParameterSpec<D>,
    ) -> Param<Tensor<D>> {
        let entry = ParameterEntry {
            path: self.join(name),
            shape: spec.shape.to_vec(),
            grid: spec.grid,
            placements: spec.placements,
            sum_over: spec.sum_over.union(spec.grid.data_axes()),
            decay: spec.decay,
            hidden: spec.hidden,
            stage: self.stage,
            pipeline_copies: self.pipeline_copies.clone(),
            frozen: self.freezes(),
        };
        let rank = self.groups.mesh_rank();
        let key = stream_key(self.shared.seed, &entry.path);
        let options = (&self.shared.device, self.shared.dtype);
        let value = match entry.check(rank.mesh()) {
            // `finish` returns the error.
            Err(_) => placeholder(spec.shape, options),
            Ok(()) => {
                let local = entry.local_shape(rank);
                match <[usize; D]>::try_from(local.as_slice()) {
                    Ok(shape) if self.is_outline => placeholder(shape, options),
                    _ => {
                        let values = spec.init.values(&entry, rank, key);
                        Tensor::from_data(TensorData::new(values, local), options)
                    }
                }
            }
        };
        self.declare(entry);
        self.param(value)
    }

    /// Adds an entry to the parameter table.
    pub(super) fn declare(&self, entry: ParameterEntry) {
        self.shared.declared.lock().push(entry);
    }

    /// Finishes the model: checks that the declared parameters are the parameters of `module`, and adds the parameter
    /// table and the registries of the layers.
    ///
    /// # Errors
    ///
    /// [`TableError`](super::TableError) if a parameter was not created by the builder, if its path differs from its
    /// path in the module, or if its declaration is [inconsistent](ParameterEntry::check).
    pub fn finish<M: Module>(self, module: M) -> Result<ParallelModule<M>, BuildError> {
        let declared = self.shared.declared.lock().clone();
        let table = ParameterTable::new(&module, declared, self.groups.mesh_rank())?;
        Ok(ParallelModule {
            module,
            table,
            position: self.shared.position.clone(),
            kernels: self.shared.kernels.lock().clone(),
            fp8: self.fp8(),
            recompute: self.recompute(),
            routers: self.routers().clone(),
            attention_logits: self.attention_logits().clone(),
            lora: self.shared.lora.lock().clone(),
        })
    }

    pub(super) fn join(&self, name: impl Display) -> String {
        if self.path.is_empty() {
            name.to_string()
        } else {
            format!("{}.{name}", self.path)
        }
    }
}
