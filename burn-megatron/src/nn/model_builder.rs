//! Builds a model: creates and declares its parameters, with the ranks, device, seed and path of each.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::sync::Arc;

use burn::module::{Module, Param};
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_megatron_kernels::attention::{AttentionEngine, Heads, Window};
use parking_lot::Mutex;

use super::arithmetic::LinearKernels;
use super::attention_engine::AttentionEngines;
use super::context::ContextGroups;
use super::fp8::{Fp8, Fp8Config, Fp8Layer, SplitOperands};
use super::init::stream_key;
use super::lora::{AdaptedLayer, LoraConfig, LoraLayers};
use super::moe::Routers;
use super::{
    AxisRank, BuildError, DropoutPosition, ParameterEntry, ParameterSpec, ParameterTable,
    Recompute, RecomputeConfig,
};
use crate::choice::{KernelChoices, KernelSelection, Operation};
use crate::comm::ParallelContext;
use crate::mesh::{Axis, Grid};

/// Builds the parameters of a model. [`ModelBuilder::child`] returns the builder of a submodule.
///
/// A layer declares the placement of a parameter in the call that creates it, so that the parameter table
/// of the model ([`ModelBuilder::finish`]) is complete by construction.
#[derive(Clone, Debug)]
pub struct ModelBuilder {
    shared: Arc<BuilderShared>,
    groups: ParallelContext,
    path: String,
    pipeline_copies: Vec<usize>,
    stage: usize,
    /// The type in which the model computes.
    compute: DType,
    /// Whether layers may use their 8-bit recipe.
    allows_fp8: bool,
    /// Whether the activations between the layers are split along the sequence.
    sequence_parallel: bool,
    /// Whether parameters are placeholders without memory.
    is_outline: bool,
    /// Whether parameters are trained in a model with adapters.
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
    /// By the size of a group of neighbours.
    context_groups: Mutex<BTreeMap<usize, ContextGroups>>,
    fp8: Mutex<Fp8>,
    recompute: Mutex<Recompute>,
    routers: Routers,
    lora: Mutex<Option<LoraLayers>>,
    declared: Mutex<Vec<ParameterEntry>>,
}

/// A tensor of this shape with one element of memory, NaN, so that reading it instead of the parameter
/// shows.
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

/// A module with its parameter table and the position of its dropout streams.
#[derive(Clone, Debug)]
pub struct ParallelModule<M> {
    /// The module, with this rank's part of each parameter.
    pub module: M,
    /// The parameter table.
    pub table: ParameterTable,
    /// The position of the dropout streams.
    pub position: DropoutPosition,
    /// Which operations are fused.
    pub kernels: KernelSelection,
    /// The layers that multiply in 8 bits.
    pub fp8: Fp8,
    /// What is recomputed in the backward.
    pub recompute: Recompute,
    /// The routers of experts.
    pub routers: Routers,
    /// The adapters of a model whose other parameters are frozen.
    pub lora: Option<LoraLayers>,
}

impl<M: Module> ParallelModule<M> {
    /// A module that is replicated on every rank, such as one of burn-nn's.
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
            lora: None,
        }
    }

    /// Sets the 8-bit layers of a module with [`Fp8Linear`](super::fp8::Fp8Linear)s, whose paths must be
    /// those in the module. A [`ModelBuilder`] sets them itself.
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
    /// The builder of a model in f32 with seed 0.
    pub fn new(groups: &ParallelContext, device: &Device) -> Self {
        Self::with(groups, device, 0, DType::F32)
    }

    /// The builder of a model with this seed and type of parameters.
    pub fn with(groups: &ParallelContext, device: &Device, seed: u64, dtype: DType) -> Self {
        let shared = BuilderShared {
            device: device.clone(),
            dtype,
            seed,
            position: DropoutPosition::default(),
            kernels: Mutex::new(automatic_kernels(device, dtype)),
            engines: Mutex::default(),
            context_groups: Mutex::default(),
            fp8: Mutex::default(),
            recompute: Mutex::default(),
            routers: Routers::default(),
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
            is_adapter: false,
        }
    }

    /// Sets which operations of the model are fused. Call on the root builder.
    ///
    /// # Errors
    ///
    /// [`BuildError::Kernels`] if a requested kernel is not available on the device.
    pub fn with_kernels(self, choices: &KernelChoices) -> Result<Self, BuildError> {
        let chosen = KernelSelection::new(choices, self.device(), self.compute)?;
        *self.shared.kernels.lock() = chosen;
        Ok(self)
    }

    /// Sets the type in which the model computes, if it is not that of the parameters. Call on the root
    /// builder, before [`with_kernels`](Self::with_kernels).
    pub fn with_compute_dtype(mut self, dtype: DType) -> Self {
        self.compute = dtype;
        *self.shared.kernels.lock() = automatic_kernels(self.device(), dtype);
        self
    }

    /// Builds placeholders: parameters with shapes but without values and memory, as on PyTorch's meta
    /// device. Call on the root builder.
    pub fn outline(self) -> Self {
        Self {
            is_outline: true,
            ..self
        }
    }

    /// The type in which the model computes.
    pub fn compute_dtype(&self) -> DType {
        self.compute
    }

    /// Whether parameters are placeholders, see [`outline`](Self::outline).
    pub fn is_outline(&self) -> bool {
        self.is_outline
    }

    /// Whether the layer uses the fused form of an operation.
    pub fn is_fused(&self, operation: Operation) -> bool {
        self.shared.kernels.lock().is_fused(operation)
    }

    /// How the matrix products of the layer are computed.
    pub fn linear_kernels(&self) -> LinearKernels {
        let kernels = self.shared.kernels.lock();
        LinearKernels {
            fused: kernels.is_fused(Operation::Linear),
            blas: kernels.blas(),
        }
    }

    /// The setting of [`LogitsShape::tokens_per_chunk`](super::LogitsShape::tokens_per_chunk).
    pub fn loss_chunk_size(&self) -> Option<usize> {
        self.shared.kernels.lock().loss_chunk_size()
    }

    /// Disables the fused form of an operation that the layer cannot use, for this reason.
    ///
    /// # Errors
    ///
    /// [`BuildError::Kernels`] if the kernel was requested.
    pub fn keep_unfused(
        &self,
        operation: Operation,
        reason: impl Into<String>,
    ) -> Result<(), BuildError> {
        Ok(self.shared.kernels.lock().keep_unfused(operation, reason)?)
    }

    /// Disables the fused form of an operation that is slower for this layer, unless it was requested.
    pub fn prefer_unfused(&self, operation: Operation, reason: impl Into<String>) {
        self.shared.kernels.lock().prefer_unfused(operation, reason);
    }

    /// The engine of fused attention with these heads on this rank, values of `value_width` features, and this window.
    /// It is selected once for the model: the requested one, or the [first that can be used](burn_megatron_kernels::attention::select_engine) on
    /// all ranks of the tensor axis.
    ///
    /// Collective over the tensor axis on GPUs in 16 bits, except for an [outline](Self::outline): call on all ranks,
    /// in the same order.
    ///
    /// # Errors
    ///
    /// [`BuildError::Kernels`] if the requested engine cannot be used; [`BuildError::Comm`].
    pub fn attention_engine(
        &self,
        (heads, value_width): (Heads, usize),
        window: Option<Window>,
    ) -> Result<Arc<dyn AttentionEngine>, BuildError> {
        let mut engines = self.shared.engines.lock();
        let heads = (heads, value_width, window);
        if let Some(engine) = engines.get(heads) {
            return Ok(engine);
        }
        let mut kernels = self.shared.kernels.lock();
        let ranks = (!self.is_outline).then(|| self.groups.tensor());
        engines.select(&mut kernels, ranks, (self.device(), self.compute), heads)
    }

    /// The groups in which the ranks of the context axis exchange, with groups of `neighbours` ranks. They are made
    /// once for the model.
    ///
    /// Collective over the context axis: call on all ranks, in the same order.
    ///
    /// # Errors
    ///
    /// [`BuildError::Comm`].
    pub fn context_groups(&self, neighbours: usize) -> Result<ContextGroups, BuildError> {
        let mut made = self.shared.context_groups.lock();
        if let Some(groups) = made.get(&neighbours) {
            return Ok(groups.clone());
        }
        let groups = ContextGroups::new(self.groups.context(), neighbours)?;
        made.insert(neighbours, groups.clone());
        Ok(groups)
    }

    /// Sets the 8-bit configuration of the model's linear layers. Call on the root builder.
    ///
    /// # Errors
    ///
    /// [`BuildError::Fp8`] for invalid settings. [`Fp8::check_layers`] checks later that each pattern
    /// matches a layer.
    pub fn with_fp8(self, config: &Fp8Config) -> Result<Self, BuildError> {
        *self.shared.fp8.lock() = Fp8::new(config)?;
        Ok(self)
    }

    /// Freezes the parameters of the model and gives its layers adapters. Call on the root builder.
    ///
    /// # Errors
    ///
    /// [`BuildError::Config`] for invalid settings. [`LoraLayers::check_targets`] checks later that the model has each
    /// target.
    pub fn with_lora(self, config: &LoraConfig) -> Result<Self, BuildError> {
        config.check()?;
        *self.shared.lora.lock() = Some(LoraLayers {
            config: config.clone(),
            layers: vec![],
        });
        Ok(self)
    }

    /// The settings of adapters, in a model that has some.
    pub fn lora_config(&self) -> Option<LoraConfig> {
        let lora = self.shared.lora.lock();
        lora.as_ref().map(|lora| lora.config.clone())
    }

    /// Adds a layer that has an adapter.
    pub(super) fn add_adapted(&self, layer: AdaptedLayer) {
        if let Some(lora) = &mut *self.shared.lora.lock() {
            lora.layers.push(layer);
        }
    }

    /// The same builder, for parameters that are trained although the model has adapters.
    pub(super) fn trained(&self) -> Self {
        Self {
            is_adapter: true,
            ..self.clone()
        }
    }

    /// Whether the parameters that it creates are frozen.
    pub(super) fn freezes(&self) -> bool {
        !self.is_adapter && self.shared.lora.lock().is_some()
    }

    /// A parameter with this value, which has a gradient unless it is frozen.
    pub(super) fn param<const D: usize>(&self, value: Tensor<D>) -> Param<Tensor<D>> {
        let param = Param::from_tensor(value);
        if self.freezes() {
            param.set_require_grad(false)
        } else {
            param
        }
    }

    /// Sets what the model recomputes in the backward. Call on the root builder.
    ///
    /// # Errors
    ///
    /// [`BuildError::Recompute`] for invalid settings. [`Recompute::check_regions`] checks later that the model has
    /// what they name.
    pub fn with_recompute(self, config: &RecomputeConfig) -> Result<Self, BuildError> {
        *self.shared.recompute.lock() = Recompute::new(config)?;
        Ok(self)
    }

    /// What the model recomputes.
    pub fn recompute(&self) -> Recompute {
        self.shared.recompute.lock().clone()
    }

    /// A builder whose layers ignore their 8-bit recipe and compute in the type of the model.
    pub fn without_fp8(&self) -> Self {
        Self {
            allows_fp8: false,
            ..self.clone()
        }
    }

    /// A builder of layers whose inputs and outputs are split along the sequence if the argument is true; by
    /// default as the layout says.
    pub fn with_sequence_parallel(&self, sequence_parallel: bool) -> Self {
        Self {
            sequence_parallel,
            ..self.clone()
        }
    }

    /// Whether the activations between the layers are split along the sequence.
    pub fn sequence_parallel(&self) -> bool {
        self.sequence_parallel
    }

    /// The 8-bit layers built so far.
    pub fn fp8(&self) -> Fp8 {
        self.shared.fp8.lock().clone()
    }

    /// The routers built so far.
    pub fn routers(&self) -> &Routers {
        &self.shared.routers
    }

    /// The 8-bit arithmetic of the linear layer, if it has a recipe. `split` tells which operands are split
    /// over the tensor axis.
    pub(super) fn fp8_layer(&self, split: SplitOperands) -> Result<Option<Fp8Layer>, BuildError> {
        let fp8 = self.fp8();
        if !self.allows_fp8 {
            fp8.add_capable(&self.path);
            return Ok(None);
        }
        Ok(fp8.layer(&self.path, self.device(), self.groups.tensor(), split)?)
    }

    /// The 8-bit arithmetic of each expert of the model in the product `name`, where it has a recipe. `split` tells
    /// which operands are split over the expert-tensor axis.
    pub(super) fn fp8_expert_layers(
        &self,
        name: &str,
        experts: usize,
        split: SplitOperands,
    ) -> Result<Vec<Option<Fp8Layer>>, BuildError> {
        let (fp8, path) = (self.fp8(), self.join(name));
        if !self.allows_fp8 {
            for expert in 0..experts {
                fp8.add_capable(&format!("{path}.{expert}"));
            }
            return Ok(vec![None; experts]);
        }
        let comm = self.groups.group(Grid::Expert, Axis::ExpertTensor)?;
        Ok(fp8.expert_layers(&path, experts, self.device(), &comm, split)?)
    }

    /// The builder of the field `name`, or of a list element.
    pub fn child(&self, name: impl Display) -> Self {
        Self {
            path: self.join(name),
            ..self.clone()
        }
    }

    /// The same builder with other groups.
    pub fn with_groups(&self, groups: ParallelContext) -> Self {
        Self {
            groups,
            ..self.clone()
        }
    }

    /// The same builder; each of these ranks of the pipeline axis, this one among them, holds a copy of its
    /// parameters. See [`ParameterEntry::pipeline_copies`].
    pub fn with_pipeline_copies(&self, ranks: impl IntoIterator<Item = usize>) -> Self {
        let mut ranks: Vec<_> = ranks.into_iter().collect();
        ranks.sort_unstable();
        ranks.dedup();
        // One copy needs no list.
        let pipeline_copies = if ranks.len() > 1 { ranks } else { vec![] };
        Self {
            pipeline_copies,
            ..self.clone()
        }
    }

    /// The same builder, for the parameters of a pipeline stage.
    pub fn in_stage(&self, stage: usize) -> Self {
        Self {
            stage,
            ..self.clone()
        }
    }

    /// The process groups.
    pub fn groups(&self) -> &ParallelContext {
        &self.groups
    }

    /// The device of the parameters.
    pub fn device(&self) -> &Device {
        &self.shared.device
    }

    /// The type of the parameters.
    pub fn dtype(&self) -> DType {
        self.shared.dtype
    }

    /// This rank's place on the tensor axis.
    pub fn place(&self) -> AxisRank {
        self.groups.place()
    }

    /// The path of the module.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The position of the dropout streams.
    pub fn position(&self) -> &DropoutPosition {
        &self.shared.position
    }

    /// The seed of the model.
    pub(super) fn seed(&self) -> u64 {
        self.shared.seed
    }

    /// See [`with_pipeline_copies`](Self::with_pipeline_copies).
    pub(super) fn pipeline_copies(&self) -> &[usize] {
        &self.pipeline_copies
    }

    /// The pipeline stage of the parameters.
    pub(super) fn stage(&self) -> usize {
        self.stage
    }

    /// The key of the module's random stream.
    pub fn stream_key(&self) -> u64 {
        stream_key(self.shared.seed, &self.path)
    }

    /// A configuration error of the module.
    pub fn error(&self, message: impl Into<String>) -> BuildError {
        BuildError::Config {
            path: self.path.clone(),
            message: message.into(),
        }
    }

    /// Creates and declares the parameter in field `name`.
    pub fn parameter<const D: usize>(
        &self,
        name: &str,
        spec: ParameterSpec<D>,
    ) -> Param<Tensor<D>> {
        let ParameterSpec {
            shape,
            grid,
            placements,
            init,
            sum_over,
            decay,
        } = spec;
        let entry = ParameterEntry {
            path: self.join(name),
            shape: shape.to_vec(),
            grid,
            placements,
            sum_over: sum_over.union(grid.data_axes()),
            decay,
            stage: self.stage,
            pipeline_copies: self.pipeline_copies.clone(),
            frozen: self.freezes(),
        };
        let (rank, key) = (
            self.groups.mesh_rank(),
            stream_key(self.shared.seed, &entry.path),
        );
        let options = (&self.shared.device, self.shared.dtype);
        let value = match entry.check(rank.mesh()) {
            // `finish` returns the error.
            Err(_) => placeholder(shape, options),
            Ok(()) => {
                let local = entry.local_shape(rank);
                match <[usize; D]>::try_from(local.as_slice()) {
                    Ok(shape) if self.is_outline => placeholder(shape, options),
                    _ => Tensor::from_data(
                        TensorData::new(init.values(&entry, rank, key), local),
                        options,
                    ),
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

    /// Finishes the model: checks that the declared parameters are those of the module.
    ///
    /// # Errors
    ///
    /// [`TableError`](super::TableError) if a parameter was not created by the builder, not under its path in the
    /// module, or with an [inconsistent](ParameterEntry::check) declaration.
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
